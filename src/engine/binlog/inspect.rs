//! Reads the files of a binlog for `--check` and `--dump`.
//!
//! Nothing is changed or locked, so a server may write at the same time. A file that the server
//! removes meanwhile is skipped: its jobs are in newer files by then, which are read later.
//!
//! A file is read in pieces, and the server may write between two of them. Then an intact record
//! looks damaged. So damage is reported only if two readings of all files found it. Two are enough,
//! because records are written one after the other and never changed. Damage is followed by another
//! record, so a record that was incomplete in the first reading was complete before the second.
//!
//! A remote disk lists the files of one moment, with their bytes. There one reading is enough, and newer files that
//! are listed while they are read would never end on a busy server.

use super::disk::{Disk, FileNumber};
use super::error::{BinlogError, Step};
use super::history::{Event, Flushes, History};
use super::reader::{Damage, Record};
use super::record::{
    self, Content, FILE_HEAD_LEN, Fields, GAP_ID, JobState, KeyRecord, Layout, Mark, SHORT_LEN,
    VERSION_LEN,
};
use crate::engine::digest::{Con, Digest};
use crate::engine::text::{CR_LF, CountOf, JsonText};
use base64::display::Base64Display;
use base64::engine::general_purpose::STANDARD;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io::{self, ErrorKind, Write};
use std::rc::Rc;

/// The contents of all files.
#[derive(Default)]
struct Survey {
    jobs: HashMap<u64, Job>,
    files: Vec<File>,
    /// All places that are not as they should be, and the lines about them.
    findings: BTreeMap<Place, String>,
    flushes: Flushes<Rc<str>>,
    /// The number of files that were listed, but removed before they were read to the end.
    vanished: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// Damaged bytes at this offset of a file.
    Damage(FileNumber, u64),
    /// Bytes that a crash has left at this offset of a file, behind its last record.
    Torn(FileNumber, u64),
    /// Missing files between these two.
    Lost(FileNumber, FileNumber),
}

/// A live job.
struct Job {
    /// The index of the file with its full record, and the offset of that in bytes.
    place: (usize, u64),
    /// The length of its full record in bytes.
    len: usize,
    key: Option<KeyRecord>,
    tube: Rc<str>,
    /// The number of flushes before its last record.
    since: u32,
    /// The fields of its last record.
    fields: Fields,
}

/// The contents of one file.
struct File {
    number: FileNumber,
    size: u64,
    used: u64,
    layout: Layout,
    records: u64,
    full_records: u64,
}

/// Prints the contents and the damage of each file. Returns whether there is no damage.
pub fn check(disk: &mut dyn Disk, out: &mut dyn Write) -> Result<bool, BinlogError> {
    let survey = Survey::read(disk)?;
    survey.print(out).map_err(BinlogError::of_output)?;
    Ok(survey.damages() == 0)
}

/// Prints each live job as one line of JSON. Returns whether there is no damage.
pub fn dump(disk: &mut dyn Disk, out: &mut dyn Write) -> Result<bool, BinlogError> {
    let mut dumped = HashSet::new();
    for _ in 0..MAX_READINGS {
        let survey = Survey::read(disk)?;
        survey.dump(disk, &mut dumped, out)?;
        if survey.jobs.keys().all(|id| dumped.contains(id)) {
            return Ok(survey.damages() == 0);
        }
        // A file was removed since the survey, and its jobs were moved to a newer one before.
    }
    let error = io::Error::other("the server moves them at the same time; dump again");
    Err(BinlogError::new(Step::Read, "cannot read all jobs", error))
}

/// At most this many readings of all files. On a busy server jobs come and go between any two.
const MAX_READINGS: usize = 5;

impl Survey {
    /// Reads all files. Damage that only one reading has found is left out.
    fn read(disk: &mut dyn Disk) -> Result<Survey, BinlogError> {
        let mut found_before = BTreeSet::new();
        let mut survey = Survey::read_once(disk)?;
        for _ in 1..MAX_READINGS {
            // A removed file may have had records that superseded those of an older file.
            let is_whole =
                survey.vanished == 0 && survey.findings.keys().all(|at| found_before.contains(at));
            if is_whole || disk.is_remote() {
                return Ok(survey);
            }
            found_before.extend(survey.findings.into_keys());
            survey = Survey::read_once(disk)?;
        }
        survey.findings.retain(|place, _| found_before.contains(place));
        Ok(survey)
    }

    fn read_once(disk: &mut dyn Disk) -> Result<Survey, BinlogError> {
        let mut survey = Survey::default();
        let mut history = History::default();
        let mut read = Vec::new();
        loop {
            let mut numbers = disk.list().map_err(BinlogError::of_list)?;
            // The server may create newer files while these are read.
            numbers.retain(|number| Some(number) > read.last());
            if numbers.is_empty() {
                break;
            }
            for &number in &numbers {
                survey.read_file(disk, number, &mut history)?;
            }
            read.extend(numbers);
            if disk.is_remote() {
                break;
            }
        }
        for (before, after) in history.gaps.lost(&read) {
            let line = format!("damage: nothing between binlog.{before} and binlog.{after}");
            survey.findings.insert(Place::Lost(before, after), line);
        }
        if let Some((number, Damage { offset, len, cause, .. })) = history.torn {
            let line = format!("  torn at {offset}: {cause} ({len} bytes, will be cut)");
            survey.findings.insert(Place::Torn(number, offset), line);
        }
        let Survey { jobs, flushes, .. } = &mut survey;
        jobs.retain(|_, job| flushes.first_after(&job.tube, job.since, job.is_buried()).is_none());
        Ok(survey)
    }

    fn read_file(
        &mut self,
        disk: &mut dyn Disk,
        number: FileNumber,
        history: &mut History,
    ) -> Result<(), BinlogError> {
        // A new file may have this number since the last reading.
        disk.close(number);
        let is_gone = match history.read_file(disk, number, |event| self.visit(number, event)) {
            // A file that is being removed is truncated while it is read.
            Ok(()) => disk.size(number).is_err_and(|error| error.kind() == ErrorKind::NotFound),
            Err(error) if error.kind == ErrorKind::NotFound => true,
            Err(error) => return Err(error),
        };
        if is_gone {
            self.vanished += 1;
            let is_here = |place: &Place| matches!(place, Place::Damage(at, _) if *at == number);
            self.findings.retain(|place, _| !is_here(place));
            history.torn.take_if(|(at, _)| *at == number);
        }
        Ok(())
    }

    fn visit(&mut self, number: FileNumber, event: Event<'_>) -> Result<(), BinlogError> {
        match event {
            Event::Opened { size, layout, .. } => {
                let (used, records, full_records) = (0, 0, 0);
                self.files.push(File { number, size, used, layout, records, full_records });
            }
            Event::Record(record, key) => {
                let file = self.files.last_mut().expect("the file is open");
                file.records += 1;
                file.full_records += u64::from(!record.tube.is_empty());
                return self.apply(record, key.map(|(_, key)| key));
            }
            Event::Damage(number, Damage { offset, len, cause, id, .. }) => {
                // The record of a flush, a key or a gap has an id that no job has.
                let job = id.filter(|&id| id < GAP_ID);
                let job = job.map_or(String::new(), |id| format!(", job {id}"));
                let line = format!("  damage at {offset}: {cause} ({len} bytes{job})");
                self.findings.insert(Place::Damage(number, offset), line);
            }
            Event::End(used) => self.files.last_mut().expect("the file is open").used = used,
        }
        Ok(())
    }

    fn apply(&mut self, record: &Record<'_>, key: Option<KeyRecord>) -> Result<(), BinlogError> {
        let &Record { offset, len, content, tube, .. } = record;
        let since = self.flushes.count;
        match content {
            Content::Job(fields) if fields.state == JobState::Deleted => {
                // Without the record of the flush, the flush has not happened.
                if let Some(job) = self.jobs.get(&fields.id)
                    && self.flushes.allow(fields.mark, &job.tube, job.since, job.is_buried())
                {
                    self.jobs.remove(&fields.id);
                }
            }
            Content::Job(fields) if !tube.is_empty() => {
                let len = usize::try_from(len).expect("the record was read into memory");
                let key = key.or_else(|| self.jobs.get(&fields.id)?.key);
                let place = (self.files.len() - 1, offset);
                let job = Job { place, len, key, tube: Rc::from(tube), since, fields };
                self.jobs.insert(fields.id, job);
            }
            Content::Job(fields) => {
                if let Some(job) = self.jobs.get_mut(&fields.id) {
                    (job.fields, job.since) = (fields, since);
                }
            }
            Content::Flush(flush) => self.flushes.add(Rc::from(tube), flush)?,
            // The record of a kept key is not live: its end is not recorded.
            Content::Key(_) | Content::Gap(_) | Content::FileHeader(..) => {}
        }
        Ok(())
    }

    /// Returns the number of damaged places.
    fn damages(&self) -> usize {
        self.findings.keys().filter(|place| !matches!(place, Place::Torn(..))).count()
    }

    // ---- Printing ----

    /// Prints the jobs that were not printed before and whose files still exist.
    fn dump(
        &self,
        disk: &mut dyn Disk,
        dumped: &mut HashSet<u64>,
        out: &mut dyn Write,
    ) -> Result<(), BinlogError> {
        let is_new = |(id, _): &(&u64, &Job)| !dumped.contains(id);
        let mut jobs: Vec<&Job> = self.jobs.iter().filter(is_new).map(|(_, job)| job).collect();
        jobs.sort_unstable_by_key(|job| job.place);
        self.files.iter().for_each(|file| disk.close(file.number));
        let mut record = Vec::new();
        for job in jobs {
            let ((index, offset), id) = (job.place, job.fields.id);
            let File { number, layout, .. } = self.files[index];
            record.resize(job.len, 0);
            let count = match disk.read(number, offset, &mut record) {
                Err(error) if error.kind() == ErrorKind::NotFound => 0,
                read => read.map_err(|error| BinlogError::of_read(number, error))?,
            };
            // A file that is being removed is truncated.
            if count == job.len
                && let Ok(body) = record::body_of(&record, layout, id)
            {
                dumped.insert(id);
                let body = body.strip_suffix(CR_LF).unwrap_or(body);
                write_job(job, body, out).map_err(BinlogError::of_output)?;
            }
        }
        Ok(())
    }

    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut live = vec![0; self.files.len()];
        // The jobs of each file and tube, by state.
        let mut counts: Vec<BTreeMap<&str, [u64; 5]>> = vec![BTreeMap::new(); self.files.len()];
        for job in self.jobs.values() {
            live[job.place.0] += (job.len + job.key.map_or(0, |_| SHORT_LEN)) as u64;
            let of_tube = counts[job.place.0].entry(&job.tube).or_default();
            of_tube[job.fields.state as usize] += 1;
        }
        for (index, file) in self.files.iter().enumerate() {
            file.print(live[index], out)?;
            for at in [Place::Damage, Place::Torn] {
                for (_, line) in self.findings.range(at(file.number, 0)..at(file.number, u64::MAX))
                {
                    writeln!(out, "{line}")?;
                }
            }
            for (tube, [_, ready, reserved, buried, delayed]) in &counts[index] {
                writeln!(
                    out,
                    "  {tube}: {ready} ready, {reserved} reserved, {delayed} delayed, {buried} buried"
                )?;
            }
        }
        for (_, line) in self.findings.range(Place::Lost(0, 0)..) {
            writeln!(out, "{line}")?;
        }
        let (files, jobs, damages) = (self.files.len(), self.jobs.len(), self.damages());
        write!(out, "{files} files, {jobs} jobs: ")?;
        match damages {
            0 => writeln!(out, "sound"),
            _ => writeln!(out, "{}", CountOf(damages as u64, "damaged place")),
        }
    }
}

impl Job {
    /// Returns whether it is buried, and no worker has reserved it.
    fn is_buried(&self) -> bool {
        self.fields.state == JobState::Buried && self.fields.mark != Mark::Held
    }
}

impl File {
    fn print(&self, live: u64, out: &mut dyn Write) -> io::Result<()> {
        let File { number, size, used, records, full_records, .. } = self;
        let version = self.layout.version;
        let checksums =
            if self.layout.has_checksums { "with checksums" } else { "without checksums" };
        // The head is neither live nor dead.
        let head = if self.layout.has_checksums { FILE_HEAD_LEN } else { VERSION_LEN };
        let dead = used.saturating_sub(live).saturating_sub(head as u64);
        writeln!(
            out,
            "binlog.{number}: version {version} {checksums}, {used} of {size} bytes used, \
             {records} records ({full_records} full), {live} bytes live, {dead} dead"
        )
    }
}

fn write_job(job: &Job, body: &[u8], out: &mut dyn Write) -> io::Result<()> {
    let Fields {
        id, pri, delay_secs, ttr_secs, counts, state, created_at, due_or_buried_at, ..
    } = job.fields;
    let (tube, word) = (&job.tube, state.name());
    write!(
        out,
        "{{\"id\":{id},\"tube\":\"{tube}\",\"state\":\"{word}\",\"pri\":{pri},\
         \"delay\":{delay_secs},\"ttr\":{ttr_secs},\"created_at_ns\":{}",
        created_at.as_nanos()
    )?;
    if let Some(KeyRecord { digest, con, .. }) = job.key {
        let Digest([a, b, c, d]) = digest;
        if !digest.is_none() {
            write!(out, ",\"key\":\"{a:08x}{b:08x}{c:08x}{d:08x}\"")?;
        }
        if let Some(Con { group, limit }) = con {
            write!(out, ",\"con\":\"{group:016x}\",\"limit\":{limit}")?;
        }
    }
    if state == JobState::Delayed {
        write!(out, ",\"due_at_ns\":{}", due_or_buried_at.as_nanos())?;
    }
    let [reserves, timeouts, releases, buries, kicks] = counts;
    write!(
        out,
        ",\"reserves\":{reserves},\"timeouts\":{timeouts},\"releases\":{releases},\
         \"buries\":{buries},\"kicks\":{kicks},"
    )?;
    match str::from_utf8(body) {
        Ok(text) => writeln!(out, "\"body\":\"{}\"}}", JsonText(text)),
        Err(_) => writeln!(out, "\"body_base64\":\"{}\"}}", Base64Display::new(body, &STANDARD)),
    }
}
