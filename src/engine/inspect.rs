//! A look into the files of a binlog: what `--check` and `--dump` tell.
//!
//! Nothing is changed, and nobody is kept out: a server may be writing at the same time. Files
//! that it removes meanwhile are passed over; what was in them is in newer ones.

use super::body::CR_LF;
use super::disk::{Disk, FileNumber};
use super::record::{self, Fields, Layout, Logged};
use super::scan::{Damage, Found, Item, ReadError, Scan};
use std::collections::{BTreeMap, HashMap};
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
    is_checked: bool,
    records: u64,
    full_records: u64,
    damages: Vec<Damage>,
    /// What is behind the last record.
    rest: Option<Damage>,
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
    let survey = Survey::of(disk)?;
    for (place, file) in survey.files.iter().enumerate() {
        let Some(mut scan) = open(disk, file.number)? else { continue };
        loop {
            match scan.next_item().map_err(|error| InspectError::Read(file.number, error))? {
                Item::Record(Found { offset, fields, body: Some(body), .. }) => {
                    let job = survey.jobs.get(&fields.id);
                    if let Some(job) = job.filter(|job| (job.file, job.offset) == (place, offset)) {
                        let body = body.bytes();
                        let body = body.strip_suffix(CR_LF).unwrap_or(body);
                        tell_job(job, body, out).map_err(InspectError::Output)?;
                    }
                }
                Item::Record(_) | Item::Damage(_) => {}
                Item::End(_) => break,
            }
        }
    }
    Ok(survey.is_sound())
}

/// The file, unless it has been removed meanwhile.
fn open(disk: &mut dyn Disk, number: FileNumber) -> Result<Option<Scan<'_>>, InspectError> {
    match Scan::open(disk, number) {
        Ok(scan) => Ok(Some(scan)),
        Err(ReadError::Io(error)) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(InspectError::Read(number, error)),
    }
}

impl Survey {
    fn of(disk: &mut dyn Disk) -> Result<Survey, InspectError> {
        let mut survey = Survey::default();
        let mut last = 0;
        loop {
            let numbers = disk.list().map_err(InspectError::List)?;
            // Newer files may come while others are read.
            let new: Vec<FileNumber> =
                numbers.into_iter().filter(|&number| number > last).collect();
            let Some(&newest) = new.last() else { break };
            for number in new {
                survey.read(disk, number)?;
            }
            last = newest;
        }
        survey.judge_tails();
        Ok(survey)
    }

    fn read(&mut self, disk: &mut dyn Disk, number: FileNumber) -> Result<(), InspectError> {
        let Some(mut scan) = open(disk, number)? else { return Ok(()) };
        let before = self.files.last().map(|file| file.number);
        self.gaps
            .extend(before.filter(|before| number - before > 1).map(|before| (before, number)));
        let mut file = File {
            number,
            size: scan.size(),
            used: 0,
            layout: scan.layout(),
            is_checked: scan.is_checked(),
            records: 0,
            full_records: 0,
            damages: Vec::new(),
            rest: None,
        };
        loop {
            match scan.next_item().map_err(|error| InspectError::Read(number, error))? {
                Item::Record(found) if record::is_marker(&found.fields) => {}
                Item::Record(found) => {
                    file.records += 1;
                    file.full_records += u64::from(found.tube.is_some());
                    self.apply(&found);
                }
                Item::Damage(damage) => file.damages.push(damage),
                Item::End(end) => {
                    file.used = end.used;
                    file.rest = end.rest;
                    break;
                }
            }
        }
        self.files.push(file);
        Ok(())
    }

    fn apply(&mut self, found: &Found<'_>) {
        let Found { offset, len, fields, tube, .. } = *found;
        if fields.state == Logged::Deleted {
            self.jobs.remove(&fields.id);
        } else if let Some(tube) = tube {
            let tube = Rc::from(tube);
            let job = Job { file: self.files.len(), offset, len, tube, fields };
            self.jobs.insert(fields.id, job);
        } else if let Some(job) = self.jobs.get_mut(&fields.id) {
            job.fields = fields;
        }
    }

    /// What is behind the last record of all is what a crash leaves; elsewhere it is damage, and
    /// so is a file with no sound beginning.
    fn judge_tails(&mut self) {
        let has_content = |file: &File| file.records > 0 || !file.damages.is_empty();
        let last = self.files.iter().rposition(has_content).unwrap_or(0);
        for (place, file) in self.files.iter_mut().enumerate() {
            let is_tail = |rest: &Damage| place >= last && rest.offset > 0;
            if file.rest.as_ref().is_some_and(|rest| !is_tail(rest)) {
                file.damages.extend(file.rest.take());
            }
        }
    }

    fn is_sound(&self) -> bool {
        self.gaps.is_empty() && self.files.iter().all(|file| file.damages.is_empty())
    }

    // ---- Telling ----

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
        let checksums = if self.is_checked { "with checksums" } else { "without checksums" };
        let dead = used.saturating_sub(live);
        writeln!(
            out,
            "binlog.{number}: version {version} {checksums}, {used} of {size} bytes used, \
             {records} records ({full_records} full), {live} bytes live, {dead} dead"
        )?;
        for Damage { offset, len, what, id, .. } in &self.damages {
            let job = id.map_or(String::new(), |id| format!(", job {id}"));
            writeln!(out, "  damage at {offset}: {what} ({len} bytes{job})")?;
        }
        if let Some(Damage { offset, len, what, .. }) = &self.rest {
            writeln!(out, "  torn at {offset}: {what} ({len} bytes, will be cut)")?;
        }
        Ok(())
    }
}

impl Count {
    fn add(&mut self, state: Logged) {
        *match state {
            Logged::Ready => &mut self.ready,
            Logged::Reserved => &mut self.reserved,
            Logged::Delayed => &mut self.delayed,
            Logged::Buried => &mut self.buried,
            Logged::Deleted => unreachable!("deleted jobs are not kept"),
        } += 1;
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Count { ready, reserved, delayed, buried } = self;
        write!(f, "{ready} ready, {reserved} reserved, {delayed} delayed, {buried} buried")
    }
}

fn tell_job(job: &Job, body: &[u8], out: &mut dyn Write) -> io::Result<()> {
    let Fields { id, pri, delay_secs, ttr_secs, counts, state, created_at, moment, .. } =
        job.fields;
    let tube = &job.tube;
    let word = match state {
        Logged::Ready => "ready",
        Logged::Reserved => "reserved",
        Logged::Delayed => "delayed",
        Logged::Buried => "buried",
        Logged::Deleted => unreachable!("deleted jobs are not kept"),
    };
    write!(
        out,
        "{{\"id\":{id},\"tube\":\"{tube}\",\"state\":\"{word}\",\"pri\":{pri},\
         \"delay\":{delay_secs},\"ttr\":{ttr_secs},\"created_at_ns\":{}",
        created_at.as_nanos()
    )?;
    if state == Logged::Delayed {
        write!(out, ",\"due_at_ns\":{}", moment.as_nanos())?;
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

/// Text, as it stands between the quotes of a JSON string (RFC 8259, section 7).
struct JsonText<'t>(&'t str);

impl fmt::Display for JsonText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        for char in self.0.chars() {
            match char {
                '"' | '\\' => write!(f, "\\{char}")?,
                '\n' => f.write_str("\\n")?,
                '\r' => f.write_str("\\r")?,
                '\t' => f.write_str("\\t")?,
                '\0'..='\x1f' => write!(f, "\\u{:04x}", u32::from(char))?,
                _ => f.write_char(char)?,
            }
        }
        Ok(())
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

    #[test]
    fn text_is_escaped() {
        let text = "a\"b\\c\r\n\t\0\u{1f}\u{e9}\u{1f600}";
        assert_eq!(JsonText(text).to_string(), r#"a\"b\\c\r\n\t\u0000\u001fé😀"#);
    }
}
