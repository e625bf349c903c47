//! The report of `--check` on a binlog that a server writes at the same time: all damage, and only
//! damage.
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod harness;

use harness::driver::{Disk, FileNumber, Nanos, Options, START, Syncing, damage, dump};
use harness::fake_disk::FakeDisk;
use harness::instance::Instance;
use harness::request::put;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::rc::Rc;

/// The files of a directory in one moment.
type Moment = BTreeMap<FileNumber, Rc<Vec<u8>>>;

/// The moments of a directory in which jobs come and go, old files are compacted and removed, and
/// some jobs are larger than a file.
fn moments(seed: u64) -> Vec<Moment> {
    let mut random = fastrand::Rng::with_seed(seed);
    let disk = FakeDisk::default();
    disk.take_history();
    let mut server = Instance::start(&disk, Options::binlog(8192, Syncing::Never), START);
    let (mut moments, mut live, mut last_id) = (Vec::new(), Vec::new(), 0_u64);
    for _ in 0..250 {
        server.advance(Nanos::from_millis(random.u64(..30)));
        let mut commands = Vec::new();
        for _ in 0..random.u8(1..5) {
            if random.u8(..10) < if live.len() < 15 { 7 } else { 3 } {
                let len = if random.u8(..40) == 0 { 9000 } else { random.usize(..700) };
                last_id += 1;
                live.push(last_id);
                commands.extend(put(0, 0, 9, "x".repeat(len)));
            } else if !live.is_empty() {
                let id = live.swap_remove(random.usize(..live.len()));
                commands.extend(format!("delete {id}\r\n").bytes());
            }
        }
        server.ask(commands);
        for disk in disk.take_history() {
            moments.push(moment(&disk, moments.last()));
        }
    }
    assert!(last_id > 100, "{last_id} jobs");
    moments
}

/// Copies the files, and shares those that have not changed since the moment before.
fn moment(disk: &FakeDisk, before: Option<&Moment>) -> Moment {
    let files = disk.live_files().into_iter().map(|(name, bytes)| {
        let number = name.strip_prefix("binlog.").unwrap().parse().unwrap();
        let same = before.and_then(|before| before.get(&number)).filter(|old| ***old == bytes);
        (number, same.cloned().unwrap_or_else(|| Rc::new(bytes)))
    });
    files.collect()
}

/// A directory that moves on to a later moment with each access.
#[derive(Debug)]
struct BusyDirectory<'m> {
    moments: &'m [Moment],
    at: usize,
    /// The most moments that pass with one access.
    haste: usize,
    random: fastrand::Rng,
    /// The open file, as it was while the directory still had it.
    open: Option<(FileNumber, Rc<Vec<u8>>)>,
    /// It moves on only when its files are listed.
    is_remote: bool,
    lists: usize,
}

impl BusyDirectory<'_> {
    fn new(moments: &[Moment], haste: usize, mut random: fastrand::Rng) -> BusyDirectory<'_> {
        let at = random.usize(..moments.len());
        BusyDirectory { moments, at, haste, random, open: None, is_remote: false, lists: 0 }
    }

    /// Returns the directory as it is now.
    fn at_rest(&self) -> BusyDirectory<'_> {
        let directory = BusyDirectory::new(self.moments, 0, self.random.clone());
        BusyDirectory { at: self.at, ..directory }
    }

    fn move_on(&mut self) -> &Moment {
        let steps = if self.is_remote { 0 } else { self.random.usize(..=self.haste) };
        self.move_by(steps)
    }

    fn move_by(&mut self, steps: usize) -> &Moment {
        self.at = (self.at + steps).min(self.moments.len() - 1);
        &self.moments[self.at]
    }

    /// Reads at one moment.
    fn read_now(
        &mut self,
        number: FileNumber,
        offset: usize,
        bytes: &mut [u8],
    ) -> io::Result<usize> {
        let found = self.move_on().get(&number).cloned();
        let file = match (found, &self.open) {
            (Some(file), _) => file,
            // A removed file is truncated in steps.
            (None, Some((open, file))) if *open == number => {
                let len = self.random.usize(..=file.len());
                Rc::new(file[..len].to_vec())
            }
            (None, _) => return Err(ErrorKind::NotFound.into()),
        };
        let rest = &file[offset.min(file.len())..];
        let count = rest.len().min(bytes.len());
        bytes[..count].copy_from_slice(&rest[..count]);
        self.open = Some((number, file));
        Ok(count)
    }
}

/// Functions that `--check` must not call.
macro_rules! read_only {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {
        $(fn $name(&mut self, $(_: $argument),*) -> $result {
            panic!("--check has called `{}`, which changes the directory", stringify!($name))
        })*
    };
}

impl Disk for BusyDirectory<'_> {
    fn is_remote(&self) -> bool {
        self.is_remote
    }

    fn list(&mut self) -> io::Result<Vec<FileNumber>> {
        self.lists += 1;
        if self.is_remote {
            return Ok(self.move_by(self.haste).keys().copied().collect());
        }
        // Some entries are read in one moment, and the others later.
        let mut numbers: Vec<FileNumber> = self.move_on().keys().copied().collect();
        numbers.truncate(self.random.usize(1..=numbers.len()));
        let last = *numbers.last().unwrap();
        numbers.extend(self.move_on().keys().filter(|&&number| number > last));
        Ok(numbers)
    }

    fn size(&mut self, number: FileNumber) -> io::Result<u64> {
        let file = self.move_on().get(&number).ok_or(ErrorKind::NotFound)?;
        Ok(file.len() as u64)
    }

    fn read(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        // The kernel copies page by page, and the server may write meanwhile.
        let offset = usize::try_from(offset).unwrap();
        let first = self.random.usize(..=bytes.len().min(8192));
        let count = self.read_now(number, offset, &mut bytes[..first])?;
        if count < first {
            return Ok(count);
        }
        Ok(first + self.read_now(number, offset + first, &mut bytes[first..])?)
    }

    fn close(&mut self, number: FileNumber) {
        self.open.take_if(|(open, _)| *open == number);
    }

    read_only! {
        create(FileNumber, u64) -> io::Result<()>;
        extend(FileNumber, u64) -> io::Result<()>;
        write(FileNumber, u64, &[u8]) -> io::Result<()>;
        begin_sync(&[FileNumber], bool, bool) -> ();
        truncate(FileNumber, u64) -> io::Result<()>;
        remove(FileNumber) -> io::Result<()>;
        quarantine(FileNumber) -> io::Result<String>;
    }
}

#[test]
fn a_sound_binlog_is_reported_as_sound_while_the_server_writes() {
    for seed in 0..6 {
        let moments = moments(seed);
        assert!(moments.len() > 400, "{} moments", moments.len());
        for (round, haste) in [1, 2, 3, 10, 30].into_iter().cycle().take(150).enumerate() {
            let random = fastrand::Rng::with_seed(round as u64);
            let mut directory = BusyDirectory::new(&moments, haste, random);
            assert_eq!(damage(&mut directory), None, "seed {seed}, round {round}");
        }
    }
}

/// One list has all files of a moment. Another one would have newer files, and then others.
#[test]
fn a_remote_disk_is_listed_once() {
    let mut moments = moments(0);
    // A chunk in etcd has whole records.
    let random = fastrand::Rng::with_seed(1);
    let is_sound = |moment: &Moment| {
        damage(&mut BusyDirectory::new(std::slice::from_ref(moment), 0, random.clone())).is_none()
    };
    moments.retain(|moment| !moment.is_empty() && is_sound(moment));
    for haste in [1, 10, 30] {
        let new = || {
            let directory = BusyDirectory::new(&moments, haste, random.clone());
            BusyDirectory { at: 100, is_remote: true, ..directory }
        };
        let mut checked = new();
        assert_eq!((damage(&mut checked), checked.lists), (None, 1), "haste {haste}");
        let mut dumped = new();
        let jobs = dump(&mut dumped).unwrap();
        assert_eq!((dump(&mut dumped.at_rest()), dumped.lists), (Some(jobs), 1), "haste {haste}");
    }
}

/// A file may be removed while its jobs are printed: they are in a newer one then.
#[test]
fn each_job_is_dumped_once_while_the_server_writes() {
    let moments = moments(0);
    let id_of = |line: &str| line.split(',').next().unwrap().to_owned();
    let ids = |dump: String| -> Vec<String> { dump.lines().map(id_of).collect() };
    let mut complete = 0;
    for (round, haste) in [1, 2, 3].repeat(20).into_iter().enumerate() {
        let random = fastrand::Rng::with_seed(round as u64);
        let mut directory = BusyDirectory::new(&moments, haste, random);
        let before = ids(dump(&mut directory.at_rest()).unwrap());
        let Some(dumped) = dump(&mut directory).map(ids) else { continue };
        complete += 1;
        let after = ids(dump(&mut directory.at_rest()).unwrap());
        let stayed: BTreeSet<&String> = before.iter().filter(|id| after.contains(id)).collect();
        let found: BTreeSet<&String> = dumped.iter().collect();
        assert!(stayed.is_subset(&found), "round {round}: {stayed:?}, {found:?}");
        assert_eq!(found.len(), dumped.len(), "round {round}");
    }
    assert!(complete > 10, "{complete} dumps were complete");
}

#[test]
fn damage_is_reported_while_the_server_writes() {
    const DAMAGED: FileNumber = 2;
    let mut random = fastrand::Rng::with_seed(1);
    let moments = moments(0);
    // The moments in which the damaged file is written and not removed yet.
    let is_written = |moment: &&Moment| moment.contains_key(&DAMAGED) && moment.contains_key(&4);
    let mut moments: Vec<Moment> = moments.iter().filter(is_written).cloned().collect();
    assert!(moments.len() > 20, "{} moments", moments.len());
    for moment in &mut moments {
        let mut bytes = moment[&DAMAGED].to_vec();
        bytes[300] ^= 1;
        moment.insert(DAMAGED, Rc::new(bytes));
    }
    for haste in [0, 1, 2, 5].repeat(20) {
        let mut directory = BusyDirectory::new(&moments, haste, random.fork());
        let report = damage(&mut directory).expect("a file is damaged");
        assert!(report.contains(": 1 damaged place\n"), "{report}");
    }
}
