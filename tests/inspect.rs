//! What `--check` reports of a binlog that a server writes at the same time: damage that is there,
//! and no other.
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod fake_disk;
mod made_up;

use beanstalkd::testing::Nanos;
use beanstalkd::testing::Syncing;
use beanstalkd::testing::inspect;
use beanstalkd::testing::{Disk, FileNumber};
use beanstalkd::testing::{Server, Settings};
use fake_disk::FakeDisk;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, IoSlice};
use std::rc::Rc;

const START: Nanos = Nanos::from_secs(1_700_000_000);

/// The files of a directory in one moment.
type Moment = BTreeMap<FileNumber, Rc<Vec<u8>>>;

/// What a server makes of its directory, from moment to moment: jobs come and go, old files are
/// emptied and removed, and some jobs are larger than a file.
fn moments(seed: u64) -> Vec<Moment> {
    let mut random = fastrand::Rng::with_seed(seed);
    let settings =
        Settings { binlog_file_size: 8192, max_job_size: 65535, max_memory_bytes: u64::MAX };
    let mut server = Server::new(settings, made_up::facts(START), START);
    let disk = FakeDisk::default();
    disk.remember();
    server.recover(disk.boxed(), Syncing::Never, START).unwrap();
    let client = server.connect().unwrap();
    let (mut now, mut moments, mut live, mut last_id) = (START, Vec::new(), Vec::new(), 0_u64);
    for _ in 0..250 {
        now = now + Nanos::from_millis(random.u64(1..30));
        server.tick(now);
        for _ in 0..random.u8(1..5) {
            let command = if random.u8(..10) < if live.len() < 15 { 7 } else { 3 } {
                let len = if random.u8(..40) == 0 { 9000 } else { random.usize(..700) };
                last_id += 1;
                live.push(last_id);
                format!("put 0 0 9 {len}\r\n{}\r\n", "x".repeat(len))
            } else if live.is_empty() {
                continue;
            } else {
                format!("delete {}\r\n", live.swap_remove(random.usize(..live.len())))
            };
            server.receive(client, command.as_bytes(), now);
            let mut slices = [IoSlice::new(&[]); 16];
            let mut output_handle = server.output_handle(client);
            let filled = output_handle.next_slices(&mut slices);
            let len = slices[..filled].iter().map(|slice| slice.len()).sum();
            output_handle.sent(len);
        }
        server.commit(now).unwrap();
        for disk in disk.take_history() {
            moments.push(moment(&disk, moments.last()));
        }
    }
    assert!(last_id > 100, "{last_id} jobs");
    moments
}

/// Shares what has not changed with the moment before.
fn moment(disk: &FakeDisk, before: Option<&Moment>) -> Moment {
    let files = disk.live_files().into_iter().map(|(name, bytes)| {
        let number = name.strip_prefix("binlog.").unwrap().parse().unwrap();
        let same = before.and_then(|before| before.get(&number)).filter(|old| ***old == bytes);
        (number, same.cloned().unwrap_or_else(|| Rc::new(bytes)))
    });
    files.collect()
}

/// A directory that goes on to a later moment with each look at it.
#[derive(Debug)]
struct BusyDirectory<'m> {
    moments: &'m [Moment],
    at: usize,
    /// How many moments may go by with one look.
    haste: usize,
    random: fastrand::Rng,
    /// The file that is open, as it was when its directory still had it.
    open: Option<(FileNumber, Rc<Vec<u8>>)>,
}

impl BusyDirectory<'_> {
    fn go_on(&mut self) -> &Moment {
        let steps = self.random.usize(..=self.haste);
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
        let found = self.go_on().get(&number).cloned();
        let file = match (found, &self.open) {
            (Some(file), _) => file,
            // A file that was removed is cut shorter and shorter.
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

impl Disk for BusyDirectory<'_> {
    fn list(&mut self) -> io::Result<Vec<FileNumber>> {
        // Some entries are read in one moment, and the others later.
        let mut numbers: Vec<FileNumber> = self.go_on().keys().copied().collect();
        numbers.truncate(self.random.usize(1..=numbers.len()));
        let last = *numbers.last().unwrap();
        numbers.extend(self.go_on().keys().filter(|&&number| number > last));
        Ok(numbers)
    }

    fn size(&mut self, number: FileNumber) -> io::Result<u64> {
        let file = self.go_on().get(&number).ok_or(ErrorKind::NotFound)?;
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

    fn create(&mut self, _: FileNumber, _: u64) -> io::Result<()> {
        unreachable!("nothing is changed")
    }

    fn extend(&mut self, _: FileNumber, _: u64) -> io::Result<()> {
        unreachable!("nothing is changed")
    }

    fn write(&mut self, _: FileNumber, _: u64, _: &[u8]) -> io::Result<()> {
        unreachable!("nothing is changed")
    }

    fn begin_sync(&mut self, _: FileNumber, _: u64, _: u64) {
        unreachable!("nothing is changed")
    }

    fn sync(&mut self, _: FileNumber) -> io::Result<()> {
        unreachable!("nothing is changed")
    }

    fn sync_directory(&mut self) -> io::Result<()> {
        unreachable!("nothing is changed")
    }

    fn cut(&mut self, _: FileNumber, _: u64) -> io::Result<()> {
        unreachable!("nothing is changed")
    }

    fn remove(&mut self, _: FileNumber) -> io::Result<()> {
        unreachable!("nothing is changed")
    }

    fn truncate_step(&mut self) -> bool {
        unreachable!("nothing is changed")
    }

    fn quarantine(&mut self, _: FileNumber) -> io::Result<String> {
        unreachable!("nothing is changed")
    }
}

/// What `--check` prints, and whether all is sound.
fn check(disk: &mut dyn Disk) -> (String, bool) {
    let mut out = Vec::new();
    let is_sound = inspect::check(disk, &mut out).unwrap();
    (String::from_utf8(out).unwrap(), is_sound)
}

#[test]
fn no_damage_is_reported_that_is_not_there() {
    for seed in 0..6 {
        let moments = moments(seed);
        assert!(moments.len() > 400, "{} moments", moments.len());
        for (round, haste) in [1, 2, 3, 10, 30].into_iter().cycle().take(150).enumerate() {
            let mut random = fastrand::Rng::with_seed(round as u64);
            let at = random.usize(..moments.len());
            let moments = &moments[..];
            let mut directory = BusyDirectory { moments, at, haste, random, open: None };
            let (told, is_sound) = check(&mut directory);
            assert!(is_sound, "seed {seed}, round {round}:\n{told}");
        }
    }
}

#[test]
fn damage_is_reported_while_the_server_writes() {
    const DAMAGED: FileNumber = 2;
    let mut random = fastrand::Rng::with_seed(1);
    let moments = moments(0);
    // Those in which a certain file has been written and is not removed yet.
    let is_written = |moment: &&Moment| moment.contains_key(&DAMAGED) && moment.contains_key(&4);
    let mut moments: Vec<Moment> = moments.iter().filter(is_written).cloned().collect();
    assert!(moments.len() > 20, "{} moments", moments.len());
    for moment in &mut moments {
        let mut bytes = moment[&DAMAGED].to_vec();
        bytes[300] ^= 1;
        moment.insert(DAMAGED, Rc::new(bytes));
    }
    for haste in [0, 1, 2, 5].repeat(20) {
        let at = random.usize(..moments.len());
        let (moments, random) = (&moments[..], random.fork());
        let mut directory = BusyDirectory { moments, at, haste, random, open: None };
        let (told, is_sound) = check(&mut directory);
        assert!(!is_sound, "{told}");
        assert!(told.contains("1 damaged places"), "{told}");
    }
}
