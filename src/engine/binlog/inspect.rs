//! Reads the files of a binlog for `--check` and `--dump`.
//!
//! Nothing is changed or locked, so a server may write at the same time. A file that the server
//! removes meanwhile is skipped: its jobs are in newer files by then, which are read later.
//!
//! A file is read in pieces, and the server may write between two of them. Then an intact record
//! looks damaged. So damage is reported only if two readings of all files found it. Two are enough,
//! because records are written one after the other and never changed. Damage is followed by another
//! record, so a record that was incomplete in the first reading was complete before the second.

use super::disk::{Disk, FileNumber};
use super::gaps::{Gap, Gaps};
use super::key_record::KeyRecord;
use super::reader::{Damage, Item, ReadError, Reader, Record, TornTail};
use super::record::{
    FILE_HEAD_LEN, Fields, FlushCounts, Layout, Mark, RecordState, SHORT_LEN, VERSION_LEN,
};
use crate::engine::digest::Digest;
use crate::engine::text::CR_LF;
use crate::engine::text::JsonText;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::rc::Rc;

/// Why the files cannot be checked or dumped.
#[derive(Debug)]
pub enum InspectError {
    /// The directory cannot be listed.
    List(io::Error),
    /// A file cannot be read.
    Read(FileNumber, ReadError),
    /// The output cannot be written.
    Output(io::Error),
}

/// The contents of all files.
#[derive(Debug, Default)]
struct Survey {
    jobs: HashMap<u64, Job>,
    files: Vec<File>,
    /// The pairs of neighbours between which files are missing.
    lost: Vec<Gap>,
    /// The files that were removed before older ones.
    gaps: Gaps,
    tail: TornTail,
    /// The flushes of each tube.
    flushes: Flushes,
    /// The key of a job, if that was the last record.
    key_before: Option<KeyRecord>,
    /// The number of files that were listed, but removed before they were read to the end.
    vanished: usize,
}

/// A damaged place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// Bytes at this offset of a file.
    Damage(FileNumber, u64),
    /// Bytes at this offset of a file, behind its last record.
    Torn(FileNumber, u64),
    /// Missing files between these two.
    Gap(FileNumber, FileNumber),
}

/// The flushes of all tubes, by name.
#[derive(Debug, Default)]
struct Flushes(HashMap<Rc<str>, FlushCounts>);

/// A live job.
#[derive(Debug)]
struct Job {
    /// The index of the file with its full record, and the offset of that in bytes.
    file: usize,
    offset: u64,
    /// The length of its full record in bytes, with that of its key.
    len: u64,
    key: Option<Digest>,
    tube: Rc<str>,
    /// The flushes of its tube before its last record.
    flushes_before: FlushCounts,
    /// The fields of its last record.
    fields: Fields,
}

/// The contents of one file.
#[derive(Debug)]
struct File {
    number: FileNumber,
    size: u64,
    used: u64,
    layout: Layout,
    records: u64,
    full_records: u64,
    damages: Vec<Damage>,
    /// The bytes that a crash has left behind the last record.
    torn: Option<Damage>,
}

/// The numbers of jobs of a tube in each state.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    ready: u64,
    reserved: u64,
    delayed: u64,
    buried: u64,
}

/// Prints the contents and the damage of each file. Returns whether there is no damage.
pub fn check(disk: &mut dyn Disk, out: &mut dyn Write) -> Result<bool, InspectError> {
    let survey = Survey::read(disk)?;
    survey.print(out).map_err(InspectError::Output)?;
    Ok(survey.is_sound())
}

/// Prints each live job as one line of JSON. Returns whether there is no damage.
pub fn dump(disk: &mut dyn Disk, out: &mut dyn Write) -> Result<bool, InspectError> {
    let mut dumped = HashSet::new();
    let mut survey = Survey::read(disk)?;
    for _ in 0..MAX_READINGS {
        survey.dump(disk, &mut dumped, out)?;
        if survey.jobs.keys().all(|id| dumped.contains(id)) {
            break;
        }
        // A file was removed since the survey, and its jobs were moved to a newer one before.
        survey = Survey::read(disk)?;
    }
    Ok(survey.is_sound())
}

/// At most this many readings of all files. On a busy server jobs come and go between any two.
const MAX_READINGS: usize = 5;

/// Opens a file, unless it was removed meanwhile.
fn open(disk: &mut dyn Disk, number: FileNumber) -> Result<Option<Reader<'_>>, InspectError> {
    // A new file may have this number since the last reading.
    disk.close(number);
    match Reader::open(disk, number) {
        Ok(reader) => Ok(Some(reader)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(InspectError::Read(number, error)),
    }
}

fn is_gone(error: &ReadError) -> bool {
    matches!(error, ReadError::Io(error) if error.kind() == ErrorKind::NotFound)
}

impl Survey {
    /// Reads all files. Damage that only one reading has found is left out.
    fn read(disk: &mut dyn Disk) -> Result<Survey, InspectError> {
        let mut found_before = BTreeSet::new();
        let mut survey = Survey::read_once(disk)?;
        for _ in 1..MAX_READINGS {
            let found = survey.places();
            // A removed file may have had records that superseded those of an older file.
            if survey.vanished == 0 && found.is_subset(&found_before) {
                return Ok(survey);
            }
            found_before.extend(found);
            survey = Survey::read_once(disk)?;
        }
        survey.keep_damage_at(&found_before);
        Ok(survey)
    }

    /// Returns all damaged places.
    fn places(&self) -> BTreeSet<Place> {
        let lost = self.lost.iter().map(|&(before, after)| Place::Gap(before, after));
        let places = self.files.iter().flat_map(|file| {
            let damages = file.damages.iter();
            let damages = damages.map(|damage| Place::Damage(file.number, damage.offset));
            damages.chain(file.torn.iter().map(|torn| Place::Torn(file.number, torn.offset)))
        });
        lost.chain(places).collect()
    }

    fn keep_damage_at(&mut self, places: &BTreeSet<Place>) {
        self.lost.retain(|&(before, after)| places.contains(&Place::Gap(before, after)));
        for File { number, damages, torn, .. } in &mut self.files {
            damages.retain(|damage| places.contains(&Place::Damage(*number, damage.offset)));
            torn.take_if(|torn| !places.contains(&Place::Torn(*number, torn.offset)));
        }
    }

    fn read_once(disk: &mut dyn Disk) -> Result<Survey, InspectError> {
        let mut survey = Survey::default();
        let mut read = Vec::new();
        loop {
            let mut numbers = disk.list().map_err(InspectError::List)?;
            // The server may create newer files while these are read.
            numbers.retain(|number| Some(number) > read.last());
            if numbers.is_empty() {
                break;
            }
            for &number in &numbers {
                survey.read_file(disk, number)?;
            }
            read.extend(numbers);
        }
        survey.lost.extend(survey.gaps.lost(&read));
        if let Some((number, torn)) = survey.tail.take() {
            survey.file_mut(number).torn = Some(torn);
        }
        let Survey { jobs, flushes, .. } = &mut survey;
        jobs.retain(|_, job| {
            !flushes.of(&job.tube).have_deleted(job.flushes_before, job.is_buried())
        });
        Ok(survey)
    }

    fn read_file(&mut self, disk: &mut dyn Disk, number: FileNumber) -> Result<(), InspectError> {
        let Some(mut reader) = open(disk, number)? else {
            self.vanished += 1;
            return Ok(());
        };
        self.files.push(File {
            number,
            size: reader.size(),
            used: 0,
            layout: reader.layout(),
            records: 0,
            full_records: 0,
            damages: Vec::new(),
            torn: None,
        });
        loop {
            let item = match reader.next_item() {
                Ok(item) => item,
                Err(error) if is_gone(&error) => break,
                Err(error) => return Err(InspectError::Read(number, error)),
            };
            if !matches!(item, Item::End(_)) {
                let followed = self.tail.take();
                self.note_damage(followed);
            }
            match item {
                Item::Record(record) => {
                    let file = self.file_mut(number);
                    file.records += 1;
                    file.full_records += u64::from(record.tube.is_some());
                    self.apply(&record);
                }
                Item::Damage(damage) => self.note_damage(Some((number, damage))),
                Item::End(end) => {
                    self.file_mut(number).used = end.used;
                    let damage = end.tail.and_then(|tail| self.tail.begins(number, tail));
                    self.note_damage(damage);
                    break;
                }
            }
        }
        // A file that is being removed is truncated while it is read.
        match disk.size(number) {
            Err(error) if error.kind() == ErrorKind::NotFound => self.forget_damage(number),
            Ok(_) | Err(_) => {}
        }
        Ok(())
    }

    fn forget_damage(&mut self, number: FileNumber) {
        self.vanished += 1;
        self.file_mut(number).damages.clear();
        if let Some((torn_in, torn)) = self.tail.take()
            && torn_in != number
        {
            self.tail.begins(torn_in, torn);
        }
    }

    fn note_damage(&mut self, damage: Option<(FileNumber, Damage)>) {
        if let Some((number, damage)) = damage {
            self.file_mut(number).damages.push(damage);
        }
    }

    fn file_mut(&mut self, number: FileNumber) -> &mut File {
        let file = self.files.iter_mut().rfind(|file| file.number == number);
        file.expect("damage is noted after its file was added")
    }

    fn apply(&mut self, record: &Record) {
        let Record { offset, len, fields, ref tube, .. } = *record;
        let key_before = self.key_before.take().filter(|key| key.id == fields.id);
        if let Some(key) = record.key {
            // The record of a kept key is not live: its end is not recorded.
            self.key_before = key.kept_until.is_none().then_some(key);
            return;
        }
        if let Some(gap) = record.gap {
            self.gaps.add(gap);
        } else if let Some((kind, tube)) = record.flush.zip(*tube) {
            self.flushes.0.entry(Rc::from(tube)).or_default().add(kind);
        } else if fields.state == RecordState::Deleted {
            // Without the record of the flush, the flush has not happened.
            if let Some(job) = self.jobs.get(&fields.id)
                && self.flushes.of(&job.tube).allow(
                    fields.mark,
                    job.flushes_before,
                    job.is_buried(),
                )
            {
                self.jobs.remove(&fields.id);
            }
        } else if let Some(tube) = tube {
            let file = self.files.len() - 1;
            let flushes_before = self.flushes.of(tube);
            let tube = Rc::from(*tube);
            let len = len + key_before.map_or(0, |_| SHORT_LEN as u64);
            let key = key_before.map(|key| key.digest);
            let job = Job { file, offset, len, key, tube, flushes_before, fields };
            self.jobs.insert(fields.id, job);
        } else if let Some(job) = self.jobs.get_mut(&fields.id) {
            job.fields = fields;
            job.flushes_before = self.flushes.of(&job.tube);
        }
    }

    fn is_sound(&self) -> bool {
        self.lost.is_empty() && self.files.iter().all(|file| file.damages.is_empty())
    }

    // ---- Printing ----

    /// Prints the jobs that were not printed before and whose files still exist.
    fn dump(
        &self,
        disk: &mut dyn Disk,
        dumped: &mut HashSet<u64>,
        out: &mut dyn Write,
    ) -> Result<(), InspectError> {
        for (index, file) in self.files.iter().enumerate() {
            let Some(mut reader) = open(disk, file.number)? else { continue };
            loop {
                match reader.next_item().map_err(|error| InspectError::Read(file.number, error))? {
                    Item::Record(Record { offset, fields, body: Some(body), .. }) => {
                        let job = self.jobs.get(&fields.id);
                        let job = job.filter(|job| (job.file, job.offset) == (index, offset));
                        if let Some(job) = job.filter(|_| dumped.insert(fields.id)) {
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

    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut live = vec![0; self.files.len()];
        let mut counts: Vec<BTreeMap<&str, Count>> = vec![BTreeMap::new(); self.files.len()];
        for job in self.jobs.values() {
            live[job.file] += job.len;
            counts[job.file].entry(&job.tube).or_default().add(job.fields.state);
        }
        for (index, file) in self.files.iter().enumerate() {
            file.print(live[index], out)?;
            for (tube, count) in &counts[index] {
                writeln!(out, "  {tube}: {count}")?;
            }
        }
        for (before, after) in &self.lost {
            writeln!(out, "damage: nothing between binlog.{before} and binlog.{after}")?;
        }
        let damages: usize = self.files.iter().map(|file| file.damages.len()).sum();
        let state = if self.is_sound() {
            "sound".to_owned()
        } else {
            format!("{} damaged places", damages + self.lost.len())
        };
        writeln!(out, "{} files, {} jobs: {state}", self.files.len(), self.jobs.len())
    }
}

impl Flushes {
    fn of(&self, tube: &str) -> FlushCounts {
        self.0.get(tube).copied().unwrap_or_default()
    }
}

impl Job {
    /// Returns whether it is buried, and no worker has reserved it.
    fn is_buried(&self) -> bool {
        self.fields.state == RecordState::Buried && self.fields.mark != Mark::Held
    }
}

impl File {
    fn print(&self, live: u64, out: &mut dyn Write) -> io::Result<()> {
        let File { number, size, used, records, full_records, .. } = self;
        let version = self.layout.version();
        let checksums =
            if self.layout.has_checksums() { "with checksums" } else { "without checksums" };
        // The head is neither live nor dead.
        let head = if self.layout.has_checksums() { FILE_HEAD_LEN } else { VERSION_LEN };
        let dead = used.saturating_sub(live).saturating_sub(head as u64);
        writeln!(
            out,
            "binlog.{number}: version {version} {checksums}, {used} of {size} bytes used, \
             {records} records ({full_records} full), {live} bytes live, {dead} dead"
        )?;
        for Damage { offset, len, cause, id, .. } in &self.damages {
            let job = id.map_or(String::new(), |id| format!(", job {id}"));
            writeln!(out, "  damage at {offset}: {cause} ({len} bytes{job})")?;
        }
        if let Some(Damage { offset, len, cause, .. }) = &self.torn {
            writeln!(out, "  torn at {offset}: {cause} ({len} bytes, will be cut)")?;
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
            RecordState::Deleted => unreachable!("deleted jobs are removed"),
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
        RecordState::Deleted => unreachable!("deleted jobs are removed"),
    };
    write!(
        out,
        "{{\"id\":{id},\"tube\":\"{tube}\",\"state\":\"{word}\",\"pri\":{pri},\
         \"delay\":{delay_secs},\"ttr\":{ttr_secs},\"created_at_ns\":{}",
        created_at.as_nanos()
    )?;
    if let Some(Digest([a, b, c, d])) = job.key {
        write!(out, ",\"key\":\"{a:08x}{b:08x}{c:08x}{d:08x}\"")?;
    }
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
            for index in 0..4 {
                let sextet = bits >> (18 - 6 * index) & 63;
                let is_there = index <= three.len();
                f.write_char(if is_there { char::from(ALPHABET[sextet as usize]) } else { '=' })?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for InspectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InspectError::List(error) => write!(f, "cannot list the directory: {error}"),
            InspectError::Read(number, error) => {
                write!(f, "cannot read binlog.{number}: {error}")
            }
            InspectError::Output(error) => write!(f, "cannot write the output: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_matches_the_rfc() {
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
