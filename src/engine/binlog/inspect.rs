//! A look into the files of a binlog: what `--check` and `--dump` tell.
//!
//! Nothing is changed, and nobody is kept out: a server may be writing at the same time. A file
//! that it removes meanwhile is passed over: its jobs are in newer files by then, which are
//! looked into too.
//!
//! A file is read in pieces, and the server may write between two of them, so that a sound record
//! looks damaged. So damage is reported only where two readings of all files found it. That is
//! enough, because records are written one after the other and never changed: damage is followed by
//! another record, so a record that was incomplete in the first reading was complete before the
//! second one began.

use super::disk::{Disk, FileNumber};
use super::reader::{self, Damage, Item, ReadError, Reader, Record, TornTail};
use super::record::{FILE_HEAD_LEN, Fields, Layout, RecordState, VERSION_LEN};
use crate::engine::text::CR_LF;
use crate::engine::text::JsonText;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::rc::Rc;

/// Why a look cannot be had.
#[derive(Debug)]
pub enum InspectError {
    /// The directory cannot be listed.
    List(io::Error),
    /// A file cannot be read.
    Read(FileNumber, ReadError),
    /// Nobody takes what is told.
    Output(io::Error),
}

/// What there is in all files.
#[derive(Debug, Default)]
struct Survey {
    jobs: HashMap<u64, Job>,
    files: Vec<File>,
    /// Pairs of neighbours between which there is none.
    gaps: Vec<(FileNumber, FileNumber)>,
    tail: TornTail,
    /// How many files were listed and removed before they were read to the end.
    vanished: usize,
}

/// Where damage was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// At this offset of a file.
    Damage(FileNumber, u64),
    /// The same, with nothing behind it.
    Torn(FileNumber, u64),
    /// Between these files.
    Gap(FileNumber, FileNumber),
}

/// A live job, as its last record has it.
#[derive(Debug)]
struct Job {
    /// Where its full record is: the place among the files, and the offset in bytes.
    file: usize,
    offset: u64,
    /// How long that is in bytes.
    len: u64,
    tube: Rc<str>,
    fields: Fields,
}

/// What there is in one file.
#[derive(Debug)]
struct File {
    number: FileNumber,
    size: u64,
    used: u64,
    layout: Layout,
    records: u64,
    full_records: u64,
    damages: Vec<Damage>,
    /// What a crash has left behind the last record.
    torn: Option<Damage>,
}

/// How many jobs of a tube are in which state.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    ready: u64,
    reserved: u64,
    delayed: u64,
    buried: u64,
}

/// Tells of each file what is in it, and in what order it is. `true` when all is sound.
///
/// # Errors
/// The files cannot be read, or `out` cannot be written to.
pub fn check(disk: &mut dyn Disk, out: &mut dyn Write) -> Result<bool, InspectError> {
    let survey = Survey::of(disk)?;
    survey.tell(out).map_err(InspectError::Output)?;
    Ok(survey.is_sound())
}

/// Tells every live job, as one line of JSON. `true` when all files are sound.
///
/// # Errors
/// The files cannot be read, or `out` cannot be written to.
pub fn dump(disk: &mut dyn Disk, out: &mut dyn Write) -> Result<bool, InspectError> {
    let mut told = HashSet::new();
    let mut survey = Survey::of(disk)?;
    for _ in 0..LOOKS {
        survey.dump(disk, &mut told, out)?;
        if survey.jobs.keys().all(|id| told.contains(id)) {
            break;
        }
        // Files have been removed since they were surveyed, and jobs moved before that.
        survey = Survey::of(disk)?;
    }
    Ok(survey.is_sound())
}

/// A busy server may always have jobs that come and go between two looks.
const LOOKS: usize = 5;

/// The file, unless it has been removed meanwhile.
fn open(disk: &mut dyn Disk, number: FileNumber) -> Result<Option<Reader<'_>>, InspectError> {
    // Another file may have this number since it was read last.
    disk.close(number);
    match Reader::open(disk, number) {
        Ok(scan) => Ok(Some(scan)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(InspectError::Read(number, error)),
    }
}

fn is_gone(error: &ReadError) -> bool {
    matches!(error, ReadError::Io(error) if error.kind() == ErrorKind::NotFound)
}

impl Survey {
    /// Reads all files. Damage that only one reading has found is left out.
    fn of(disk: &mut dyn Disk) -> Result<Survey, InspectError> {
        let mut found_before = BTreeSet::new();
        let mut survey = Survey::attempt(disk)?;
        for _ in 1..LOOKS {
            let found = survey.places();
            // What was read before a file that has gone may have been taken back there.
            if survey.vanished == 0 && found.is_subset(&found_before) {
                return Ok(survey);
            }
            found_before.extend(found);
            survey = Survey::attempt(disk)?;
        }
        survey.keep_damage_at(&found_before);
        Ok(survey)
    }

    /// Where damage was found.
    fn places(&self) -> BTreeSet<Place> {
        let gaps = self.gaps.iter().map(|&(before, after)| Place::Gap(before, after));
        let places = self.files.iter().flat_map(|file| {
            let damages = file.damages.iter();
            let damages = damages.map(|damage| Place::Damage(file.number, damage.offset));
            damages.chain(file.torn.iter().map(|torn| Place::Torn(file.number, torn.offset)))
        });
        gaps.chain(places).collect()
    }

    fn keep_damage_at(&mut self, places: &BTreeSet<Place>) {
        self.gaps.retain(|&(before, after)| places.contains(&Place::Gap(before, after)));
        for File { number, damages, torn, .. } in &mut self.files {
            damages.retain(|damage| places.contains(&Place::Damage(*number, damage.offset)));
            torn.take_if(|torn| !places.contains(&Place::Torn(*number, torn.offset)));
        }
    }

    fn attempt(disk: &mut dyn Disk) -> Result<Survey, InspectError> {
        let mut survey = Survey::default();
        let mut last = 0;
        loop {
            let mut numbers = disk.list().map_err(InspectError::List)?;
            // Newer files may come while others are read.
            numbers.retain(|&number| number > last);
            let Some(&newest) = numbers.last() else { break };
            survey.gaps.extend(reader::gaps(&numbers));
            for number in numbers {
                survey.read(disk, number)?;
            }
            last = newest;
        }
        if let Some((number, rest)) = survey.tail.take() {
            survey.numbered(number).torn = Some(rest);
        }
        Ok(survey)
    }

    fn read(&mut self, disk: &mut dyn Disk, number: FileNumber) -> Result<(), InspectError> {
        let Some(mut scan) = open(disk, number)? else {
            self.vanished += 1;
            return Ok(());
        };
        self.files.push(File {
            number,
            size: scan.size(),
            used: 0,
            layout: scan.layout(),
            records: 0,
            full_records: 0,
            damages: Vec::new(),
            torn: None,
        });
        loop {
            let item = match scan.next_item() {
                Ok(item) => item,
                Err(error) if is_gone(&error) => break,
                Err(error) => return Err(InspectError::Read(number, error)),
            };
            if !matches!(item, Item::End(_)) {
                let followed = self.tail.take();
                self.note_damage(followed);
            }
            match item {
                Item::Record(found) => {
                    let file = self.numbered(number);
                    file.records += 1;
                    file.full_records += u64::from(found.tube.is_some());
                    self.apply(&found);
                }
                Item::Damage(damage) => self.note_damage(Some((number, damage))),
                Item::End(end) => {
                    self.numbered(number).used = end.used;
                    let damage = end.rest.and_then(|rest| self.tail.begins(number, rest));
                    self.note_damage(damage);
                    break;
                }
            }
        }
        // A file that is removed gets shorter while it is read.
        match disk.size(number) {
            Err(error) if error.kind() == ErrorKind::NotFound => self.forget_damage(number),
            Ok(_) | Err(_) => {}
        }
        Ok(())
    }

    fn forget_damage(&mut self, number: FileNumber) {
        self.vanished += 1;
        self.numbered(number).damages.clear();
        if let Some((torn_in, rest)) = self.tail.take()
            && torn_in != number
        {
            self.tail.begins(torn_in, rest);
        }
    }

    fn note_damage(&mut self, damage: Option<(FileNumber, Damage)>) {
        if let Some((number, damage)) = damage {
            self.numbered(number).damages.push(damage);
        }
    }

    fn numbered(&mut self, number: FileNumber) -> &mut File {
        let file = self.files.iter_mut().rfind(|file| file.number == number);
        file.expect("only files that are read are spoken of")
    }

    fn apply(&mut self, found: &Record) {
        let Record { offset, len, fields, ref tube, .. } = *found;
        if fields.state == RecordState::Deleted {
            self.jobs.remove(&fields.id);
        } else if let Some(tube) = tube {
            let file = self.files.len() - 1;
            let job = Job { file, offset, len, tube: Rc::from(&**tube), fields };
            self.jobs.insert(fields.id, job);
        } else if let Some(job) = self.jobs.get_mut(&fields.id) {
            job.fields = fields;
        }
    }

    fn is_sound(&self) -> bool {
        self.gaps.is_empty() && self.files.iter().all(|file| file.damages.is_empty())
    }

    // ---- Telling ----

    /// Tells the jobs that were not told before, as far as their files are still there.
    fn dump(
        &self,
        disk: &mut dyn Disk,
        told: &mut HashSet<u64>,
        out: &mut dyn Write,
    ) -> Result<(), InspectError> {
        for (place, file) in self.files.iter().enumerate() {
            let Some(mut scan) = open(disk, file.number)? else { continue };
            loop {
                match scan.next_item().map_err(|error| InspectError::Read(file.number, error))? {
                    Item::Record(Record { offset, fields, body: Some(body), .. }) => {
                        let job = self.jobs.get(&fields.id);
                        let job = job.filter(|job| (job.file, job.offset) == (place, offset));
                        if let Some(job) = job.filter(|_| told.insert(fields.id)) {
                            let body = body.strip_suffix(CR_LF).unwrap_or(body);
                            write_job(job, body, out).map_err(InspectError::Output)?;
                        }
                    }
                    Item::Record(_) | Item::Damage(_) => {}
                    Item::End(_) => break,
                }
            }
        }
        Ok(())
    }

    fn tell(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut live = vec![0; self.files.len()];
        let mut counts: Vec<BTreeMap<&str, Count>> = vec![BTreeMap::new(); self.files.len()];
        for job in self.jobs.values() {
            live[job.file] += job.len;
            counts[job.file].entry(&job.tube).or_default().add(job.fields.state);
        }
        for (place, file) in self.files.iter().enumerate() {
            file.tell(live[place], out)?;
            for (tube, count) in &counts[place] {
                writeln!(out, "  {tube}: {count}")?;
            }
        }
        for (before, after) in &self.gaps {
            writeln!(out, "damage: nothing between binlog.{before} and binlog.{after}")?;
        }
        let damages: usize = self.files.iter().map(|file| file.damages.len()).sum();
        let state = if self.is_sound() {
            "sound".to_owned()
        } else {
            format!("{} damaged places", damages + self.gaps.len())
        };
        writeln!(out, "{} files, {} jobs: {state}", self.files.len(), self.jobs.len())
    }
}

impl File {
    fn tell(&self, live: u64, out: &mut dyn Write) -> io::Result<()> {
        let File { number, size, used, records, full_records, .. } = self;
        let version = self.layout.version();
        let checksums =
            if self.layout.is_checked() { "with checksums" } else { "without checksums" };
        // The version and the marker are neither.
        let head = if self.layout.is_checked() { FILE_HEAD_LEN } else { VERSION_LEN };
        let dead = used.saturating_sub(live).saturating_sub(head as u64);
        writeln!(
            out,
            "binlog.{number}: version {version} {checksums}, {used} of {size} bytes used, \
             {records} records ({full_records} full), {live} bytes live, {dead} dead"
        )?;
        for Damage { offset, len, what, id, .. } in &self.damages {
            let job = id.map_or(String::new(), |id| format!(", job {id}"));
            writeln!(out, "  damage at {offset}: {what} ({len} bytes{job})")?;
        }
        if let Some(Damage { offset, len, what, .. }) = &self.torn {
            writeln!(out, "  torn at {offset}: {what} ({len} bytes, will be cut)")?;
        }
        Ok(())
    }
}

impl Count {
    fn add(&mut self, state: RecordState) {
        *match state {
            RecordState::Ready => &mut self.ready,
            RecordState::Reserved => &mut self.reserved,
            RecordState::Delayed => &mut self.delayed,
            RecordState::Buried => &mut self.buried,
            RecordState::Deleted => unreachable!("deleted jobs are not kept"),
        } += 1;
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Count { ready, reserved, delayed, buried } = self;
        write!(f, "{ready} ready, {reserved} reserved, {delayed} delayed, {buried} buried")
    }
}

fn write_job(job: &Job, body: &[u8], out: &mut dyn Write) -> io::Result<()> {
    let Fields {
        id, pri, delay_secs, ttr_secs, counts, state, created_at, due_or_buried_at, ..
    } = job.fields;
    let tube = &job.tube;
    let word = match state {
        RecordState::Ready => "ready",
        RecordState::Reserved => "reserved",
        RecordState::Delayed => "delayed",
        RecordState::Buried => "buried",
        RecordState::Deleted => unreachable!("deleted jobs are not kept"),
    };
    write!(
        out,
        "{{\"id\":{id},\"tube\":\"{tube}\",\"state\":\"{word}\",\"pri\":{pri},\
         \"delay\":{delay_secs},\"ttr\":{ttr_secs},\"created_at_ns\":{}",
        created_at.as_nanos()
    )?;
    if state == RecordState::Delayed {
        write!(out, ",\"due_at_ns\":{}", due_or_buried_at.as_nanos())?;
    }
    write!(
        out,
        ",\"reserves\":{},\"timeouts\":{},\"releases\":{},\"buries\":{},\"kicks\":{},",
        counts.reserves, counts.timeouts, counts.releases, counts.buries, counts.kicks
    )?;
    match str::from_utf8(body) {
        Ok(text) => writeln!(out, "\"body\":\"{}\"}}", JsonText(text)),
        Err(_) => writeln!(out, "\"body_base64\":\"{}\"}}", Base64(body)),
    }
}

/// Bytes in base64 (RFC 4648, section 4).
struct Base64<'b>(&'b [u8]);

impl fmt::Display for Base64<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        const ALPHABET: &[u8; 64] =
            b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        for three in self.0.chunks(3) {
            let byte = |index: usize| u32::from(three.get(index).copied().unwrap_or(0));
            let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
            for place in 0..4 {
                let sextet = bits >> (18 - 6 * place) & 63;
                let is_there = place <= three.len();
                f.write_char(if is_there { char::from(ALPHABET[sextet as usize]) } else { '=' })?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for InspectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InspectError::List(error) => write!(f, "the directory cannot be listed: {error}"),
            InspectError::Read(number, error) => {
                write!(f, "binlog.{number} cannot be read: {error}")
            }
            InspectError::Output(error) => write!(f, "cannot write: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_base64() {
        // RFC 4648, section 10.
        let pairs = [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ];
        for (bytes, text) in pairs {
            assert_eq!(Base64(bytes.as_bytes()).to_string(), text);
        }
        assert_eq!(Base64(&[0xfb, 0xff, 0xfe]).to_string(), "+//+");
    }
}
