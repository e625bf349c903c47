//! Damaged files: flipped bits, torn tails and records inside bodies cost at most what they hit.
//! `fuzz_smoke` starts the server on any bytes.

use crate::harness::driver::{Limits, Nanos, Options, START, damage};
use crate::harness::fake_disk::{FakeDisk, Files};
use crate::harness::instance::Instance;
use crate::harness::record::{FILE_HEAD_LEN, READY, Record, VERSION_7};
use crate::harness::yaml::COUNTS;
use crate::{disk_with_file, record_len, start};
use std::collections::BTreeMap;

const OPTIONS: Options = Options::synced(65_536);
const SMALL_FILES: Options = Options::synced(2048);
/// From the start of a record of the tube `default` to the length of its body.
const BODY_LEN_AT: usize = 4 + "default".len() + 32;
/// The length of a full record without tube and body, and of a short one.
const HEAD_LEN: usize = 84;

/// What does not change with time, and the body, which has no spaces.
type Job = Option<(String, String)>;

fn job(server: &mut Instance, id: u64) -> Job {
    let text = server.job(id, &format!("state pri {COUNTS}"))?;
    text.rsplit_once(' ').map(|(values, body)| (values.to_owned(), body.to_owned()))
}

/// A log with all kinds of records in several files, the jobs in it, and when it was closed.
fn sample() -> (Files, BTreeMap<u64, Job>, Nanos) {
    const JOBS: u64 = 24;
    let (disk, mut server) = start(SMALL_FILES);
    for id in 1..=JOBS {
        let tube = ["default", "mail", "a-long-name"][usize::try_from(id % 3).unwrap()];
        let body = format!("{id}-").repeat(if id % 12 == 5 { 400 } else { 10 });
        let (pri, delay, len) = (id * 50, 400 + id, body.len());
        let first_delay = if id % 7 == 0 { delay } else { 0 };
        server.ask(format!("put-in-tube {tube} {pri} {first_delay} 1000 {len}\r\n{body}\r\n"));
        // Jobs change when others have been put.
        let id = (id * 5) % JOBS;
        server.ask(match id % 6 {
            0 | 1 => format!("delete {id}\r\n"),
            2 => format!("reserve-job {id}\r\nbury {id} {pri}\r\n"),
            3 => format!("reserve-job {id}\r\nbury {id} {pri}\r\nkick-job {id}\r\n"),
            4 => format!("reserve-job {id}\r\nrelease {id} {pri} {delay}\r\n"),
            _ => format!("reserve-job {id}\r\nrelease {id} {pri} 0\r\n"),
        });
    }
    server.close();
    let files = disk.live_files();
    let now = server.now + Nanos::from_nanos(500_000);
    let mut server = Instance::on_files(&files, SMALL_FILES, now);
    let views = (1..=JOBS).map(|id| (id, job(&mut server, id))).collect();
    (files, views, now)
}

/// Returns the name of the newest file.
fn last_of(files: &Files) -> &String {
    files.keys().max_by_key(|name| (name.len(), *name)).unwrap()
}

#[test]
fn a_flipped_bit_changes_no_body_and_loses_at_most_one_job() {
    let (files, views, now) = sample();
    assert!(files.len() >= 3, "{:?}", files.keys());
    for (name, bytes) in &files {
        // Every bit of the version and the file header record, and one bit in every second byte of
        // the records.
        let head = (0..FILE_HEAD_LEN * 8).map(|bit| (bit / 8, bit % 8));
        let records = (FILE_HEAD_LEN..bytes.len()).step_by(2).map(|at| (at, at / 2 % 8));
        for (at, bit) in head.chain(records) {
            let mut damaged = files.clone();
            damaged.get_mut(name).unwrap()[at] ^= 1 << bit;
            let disk = FakeDisk::with_files(&damaged);
            let mut server = Instance::start(&disk, SMALL_FILES, now);
            let last_id = server.recovered.last_id;
            assert!(last_id < 1 << 21, "{name}:{at}.{bit}: {last_id} is the last id");
            let mut changed = 0;
            for (id, before) in &views {
                let after = job(&mut server, *id);
                if let (Some(after), Some(before)) = (&after, before) {
                    assert_eq!(after.1, before.1, "{name}:{at}");
                }
                changed += usize::from(&after != before);
            }
            assert!(changed <= 1, "{name}:{at}.{bit}: {changed} jobs have changed");
            let kept = disk.live_files().remove(&format!("{name}.damaged"));
            let is_kept = kept.as_ref() == Some(&damaged[name]);
            let is_last = last_of(&files) == name;
            assert!(is_kept || is_last, "{name}:{at}: the damaged file is not kept as it was");
        }
    }
}

#[test]
fn a_file_without_an_intact_record_is_kept_as_it_was() {
    let (files, _, now) = sample();
    let name = files.keys().find(|name| *name != last_of(&files)).expect("it has several");
    // A power cut may leave zeros at the beginning.
    for (zeros, intact) in [(4, 0), (0, FILE_HEAD_LEN)] {
        let mut files = files.clone();
        let bytes = files.get_mut(name).unwrap();
        bytes[..zeros].fill(0);
        bytes[zeros + intact..].fill(b'x');
        let disk = FakeDisk::with_files(&files);
        let _server = Instance::start(&disk, SMALL_FILES, now);
        let kept = disk.live_files().remove(&format!("{name}.damaged"));
        assert!(kept.as_ref() == files.get(name), "{name} is not kept as it was");
    }
}

#[test]
fn jobs_before_a_damaged_file_are_moved_while_clients_are_served() {
    const JOBS: usize = 200;
    let (disk, mut server) = start(SMALL_FILES);
    server.put_all(JOBS as u64, [b'x'; 400]);
    server.close();
    let mut files = disk.live_files();
    let bytes: usize = files.values().map(Vec::len).sum();
    let name = last_of(&files).clone();
    files.get_mut(&name).unwrap()[FILE_HEAD_LEN + HEAD_LEN] ^= 1;
    let disk = FakeDisk::with_files(&files);
    let limits = Limits { moved_at_start_bytes: 4096, ..Limits::DEFAULT };
    let mut again = Instance::start(&disk, Options { limits, ..SMALL_FILES }, server.now);
    assert_eq!(again.recovered.jobs, JOBS as u64 - 1);
    let taken: usize = disk.live_files().values().map(Vec::len).sum();
    assert!(taken < bytes + bytes / 2, "{taken} bytes at the start, and {bytes} before");
    assert!(disk.live_files().contains_key(&name), "{name} is gone before its jobs are moved");
    again.idle(1000);
    assert!(disk.live_files()[&format!("{name}.damaged")] == files[&name], "{name} has changed");
    assert!(!disk.live_files().contains_key(&name), "{name} is still there");
    assert_eq!(again.stat("current-jobs-ready"), JOBS as u64 - 1);
}

#[test]
fn a_torn_tail_is_truncated_wherever_it_is_torn() {
    let (files, views, now) = sample();
    let last = last_of(&files);
    let bytes = &files[last];
    for len in FILE_HEAD_LEN..bytes.len() {
        let mut torn = files.clone();
        let torn_bytes = torn.get_mut(last).unwrap();
        torn_bytes.truncate(len);
        torn_bytes.resize(2048, 0);
        let disk = FakeDisk::with_files(&torn);
        let mut server = Instance::start(&disk, SMALL_FILES, now);
        let lost = views.iter().filter(|(id, before)| {
            let after = job(&mut server, **id);
            if let (Some(after), Some(before)) = (&after, before) {
                assert_eq!(after.1, before.1, "truncated to {len}");
            }
            after.is_none() && before.is_some()
        });
        // At most one job for each torn record.
        let (lost, torn) = (lost.count(), records_from(bytes, len));
        assert!(lost <= torn, "truncated to {len}: {lost} jobs of {torn} torn records are lost");
        let left = disk.live_files().get(last).map_or(0, Vec::len);
        // A record may end in zeros: that of a delete has counts, state and mark there.
        let zeros = bytes[len..].iter().take_while(|&&byte| byte == 0).count();
        assert!(left <= len + zeros, "torn at {len}, and {left} bytes are left");
    }
}

#[test]
fn the_last_record_is_torn_only_if_a_sector_of_it_was_not_written() {
    let body = [b'x'; 1500];
    for is_closed in [false, true] {
        let (disk, mut server) = file_with([&b"first"[..], &body]);
        if is_closed {
            server.close();
        }
        let files = disk.live_files();
        let start_with = |from: usize, to: usize, change: fn(&mut u8)| {
            let mut files = files.clone();
            files.get_mut("binlog.1").unwrap()[from..to].iter_mut().for_each(change);
            let disk = FakeDisk::with_files(&files);
            let recovered = Instance::start(&disk, OPTIONS, START).recovered;
            let is_kept = disk.live_files().contains_key("binlog.1.damaged");
            (recovered.jobs, recovered.last_id, is_kept)
        };
        assert_eq!(start_with(0, 0, |_| ()), (2, 2, false));
        for at in [700, 1023, 1024, 1400] {
            assert_eq!(start_with(at, at + 1, |byte| *byte ^= 1), (1, 2, true), "{at}");
        }
        assert_eq!(start_with(520, 1020, |byte| *byte = 0), (1, 2, true));
        for from in [512, 1024] {
            assert_eq!(start_with(from, from + 512, |byte| *byte = 0), (1, 1, false), "{from}");
        }
    }
}

/// The deletes of a file may then come before the puts of their jobs, and a flush behind puts.
#[test]
fn a_file_under_another_name_is_reported_and_loses_no_job() {
    const JOBS: u64 = 150;
    let options = Options::synced(4096);
    let (disk, mut server) = start(options);
    let put = |server: &mut Instance, id| {
        let tube = if id % 4 == 0 { "flushed" } else { "kept" };
        let put = format!("put-in-tube {tube} 0 0 9 100\r\n{id:0100}\r\n");
        server.expect(put, &format!("INSERTED {id}\r\n"));
    };
    (1..JOBS / 2).for_each(|id| put(&mut server, id));
    server.ask("flush-tube flushed\r\n");
    (JOBS / 2..=JOBS).for_each(|id| put(&mut server, id));
    [JOBS - 1, 2, JOBS / 2].into_iter().for_each(|id| server.delete(id));
    let (mut files, now) = (disk.live_files(), server.now);
    files.retain(|_, bytes| bytes[VERSION_7.len() + 4] > 0);
    let live: Vec<(u64, String)> =
        (1..=JOBS).filter_map(|id| Some((id, server.job(id, COUNTS)?))).collect();
    let names: Vec<&String> = files.keys().collect();
    assert!(names.len() >= 4 && live.len() > 20, "{names:?} with {} jobs", live.len());
    let find = |files: &Files, renamed: &[(&str, &str)]| {
        let report = damage(&mut FakeDisk::with_files(files)).expect("it is found");
        let disk = FakeDisk::with_files(files);
        let mut again = Instance::start(&disk, options, now);
        for (id, before) in &live {
            assert_eq!(again.job(*id, COUNTS).as_ref(), Some(before), "{id} after {renamed:?}");
        }
        for (from, to) in renamed {
            let line = format!("damage at 4: the file was {from}, so deleted jobs may be back");
            assert!(report.contains(&line), "{report}");
            let kept = disk.live_files().remove(&format!("{to}.damaged"));
            assert!(kept.as_ref() == files.get(*to), "{to} is not kept as it was");
        }
        assert_eq!(damage(&mut disk.clone()), None);
    };
    for (index, one) in names.iter().enumerate() {
        for other in &names[index + 1..] {
            let mut exchanged = files.clone();
            let (first, second) = (files[*one].clone(), files[*other].clone());
            exchanged.extend([((*other).clone(), first), ((*one).clone(), second)]);
            find(&exchanged, &[(one, other), (other, one)]);
        }
        let mut copied = files.clone();
        copied.insert("binlog.77".to_owned(), files[*one].clone());
        find(&copied, &[(one, "binlog.77")]);
        copied.remove(*one);
        find(&copied, &[(one, "binlog.77")]);
    }
}

/// Truncated between two records or emptied, with zeros instead or not, or replaced by the file of another queue.
#[test]
fn a_file_that_lost_its_end_or_was_replaced_is_reported() {
    const JOBS: u64 = 150;
    let options = Options::synced(4096);
    let used = |disk: &FakeDisk| {
        let mut files = disk.live_files();
        files.retain(|_, bytes| bytes.len() > VERSION_7.len() && bytes[VERSION_7.len() + 4] > 0);
        files
    };
    let [(disk, server), (other, _)] = [(); 2].map(|()| {
        let (disk, mut server) = start(options);
        server.put_all(JOBS, [b'x'; 100]);
        (2..JOBS).step_by(3).for_each(|id| server.delete(id));
        (disk, server)
    });
    let find = |name: &str, bytes: &[u8], at: usize, missing: usize| {
        let mut files = used(&disk);
        files.insert(name.to_owned(), bytes.to_vec());
        let report = damage(&mut FakeDisk::with_files(&files)).expect("it is found");
        let line = format!(
            "damage at {at}: the file ended otherwise when the next one was begun, so jobs may be lost and \
             deleted ones back ({missing} bytes)"
        );
        assert!(report.contains(&line), "{report}");
        // The file of another queue does not continue the one before it either.
        let places = report.matches("damage at").count();
        assert!(places == 1 || (missing == 0 && places == 2), "{report}");
        let disk = FakeDisk::with_files(&files);
        let again = Instance::start(&disk, options, server.now);
        let lost = records_from(&used(&other)[name], at) as u64;
        let (least, jobs) = (JOBS * 2 / 3 - lost, again.recovered.jobs);
        assert!(
            jobs >= least,
            "{name} is cut at {at}: {jobs} jobs, and at least {least} should be left"
        );
        let kept = disk.live_files().remove(&format!("{name}.damaged"));
        assert!(kept.as_deref() == Some(bytes), "{name} is not kept as it was");
        assert_eq!(damage(&mut disk.clone()), None);
    };
    let files = used(&disk);
    assert!(files.len() >= 4 && files.len() == used(&other).len(), "{:?}", files.keys());
    for (name, bytes) in files.iter().filter(|(name, _)| *name != last_of(&files)) {
        find(name, &[], 0, bytes.len());
        find(name, &vec![0; bytes.len()], 0, bytes.len());
        find(name, &used(&other)[name], bytes.len(), 0);
        for at in record_ends(bytes).into_iter().rev().skip(1).step_by(5) {
            find(name, &bytes[..at], at, bytes.len() - at);
            let zeros = vec![0; bytes.len() - at];
            find(name, &[&bytes[..at], &zeros].concat(), at, bytes.len() - at);
        }
    }
}

/// Although older files are still there.
#[test]
fn a_lost_file_is_reported_until_the_next_start() {
    let options = Options::synced(4096);
    let (disk, mut server) = start(options);
    server.put_all(150, [b'x'; 100]);
    let mut files = disk.live_files();
    files.remove("binlog.3");
    let report = damage(&mut FakeDisk::with_files(&files)).expect("a file is lost");
    assert!(report.contains("nothing between binlog.2 and binlog.4"), "{report}");
    let disk = FakeDisk::with_files(&files);
    Instance::start(&disk, options, server.now);
    assert!(disk.live_files().contains_key("binlog.2"), "{:?}", disk.names());
    assert_eq!(damage(&mut disk.clone()), None);
    let mut files = disk.live_files();
    files.remove("binlog.4");
    assert!(damage(&mut FakeDisk::with_files(&files)).is_some(), "another file is lost");
}

/// Counts the records of version 7 that end after `from`.
fn records_from(bytes: &[u8], from: usize) -> usize {
    record_ends(bytes).into_iter().filter(|&end| end > from).count()
}

/// Returns the offset behind each record of version 7.
fn record_ends(bytes: &[u8]) -> Vec<usize> {
    let number = |at: usize| u32::from_ne_bytes(*bytes[at..].first_chunk().unwrap()) as usize;
    let (mut at, mut ends) = (4, Vec::new());
    while at < bytes.len() {
        let name_len = number(at);
        let is_full = name_len > 0 && bytes[at + 4 + name_len + 76] != 0;
        at += HEAD_LEN + name_len + if is_full { number(at + 4 + name_len + 32) } else { 0 };
        ends.push(at);
    }
    ends
}

/// A bit of the nonce of the file, and one of the length of the first body.
const NONCE: (usize, u8) = (4 + 4 + 36, 1);
const LENGTH: (usize, u8) = (FILE_HEAD_LEN + BODY_LEN_AT, 0x40);

/// Returns a file with jobs of these bodies, and the server that has written it.
fn file_with<'b>(bodies: impl IntoIterator<Item = &'b [u8]>) -> (FakeDisk, Instance) {
    let (disk, mut server) = start(OPTIONS);
    bodies.into_iter().for_each(|body| assert!(server.put(body).is_some()));
    (disk, server)
}

/// Starts a server on the file with these bits flipped.
fn start_with_flips(disk: &FakeDisk, flips: &[(usize, u8)]) -> Instance {
    let mut files = disk.live_files();
    let bytes = files.get_mut("binlog.1").unwrap();
    flips.iter().for_each(|(at, mask)| bytes[*at] ^= mask);
    Instance::on_files(&files, OPTIONS, START)
}

#[test]
fn a_record_with_a_wrong_length_loses_no_other_record() {
    const JOBS: usize = 40;
    // Records of 128 bytes: a flipped bit skips exactly one record.
    let (disk, _) = file_with([&[b'x'; 35][..]; JOBS]);
    let third = FILE_HEAD_LEN + 2 * 128;
    assert_eq!(disk.live_files()["binlog.1"][third + 4..third + 11], *b"default");
    let lengths = [third..third + 4, third + BODY_LEN_AT..third + BODY_LEN_AT + 4];
    for at in lengths.into_iter().flatten() {
        for bit in 0..8 {
            let recovered = start_with_flips(&disk, &[(at, 1 << bit)]).recovered;
            assert_eq!(recovered.jobs, JOBS as u64 - 1, "bit {bit} of byte {at}");
        }
    }
}

/// The end of one record and the beginning of the next one may look like the delete of a job. Without checksums the
/// search for records does not trust what has no tube and no body.
#[test]
fn a_record_of_c_with_a_wrong_length_loses_no_other_record() {
    const JOBS: u64 = 40;
    for (text, pri) in [("", 0), ("x", 10), ("hello", 1024), ("a longer body", 65_536)] {
        let body = format!("{text}\r\n");
        let job = |id| Record {
            id,
            tube: "default",
            state: READY,
            body: body.as_bytes(),
            pri,
            ttr_ns: 60_000_000_000,
            created_at_ns: START.as_nanos() + id * 50_000,
            ..Record::default()
        };
        // What a client has sent inside a body is older than any job.
        let inside = Record { created_at_ns: 0, ..job(99) }.v7(None);
        let first = Record { body: &[&inside[..], b"\r\n"].concat(), ..job(100) }.v7(None);
        let others = (1..=JOBS).flat_map(|id| job(id).v7(None));
        let mut bytes: Vec<u8> = VERSION_7.into_iter().chain(first).chain(others).collect();
        bytes[VERSION_7.len() + BODY_LEN_AT] ^= 0x40;
        bytes.resize(65_536, 0);
        let mut server = Instance::start(&disk_with_file(bytes), OPTIONS, START);
        assert_eq!(server.recovered.jobs, JOBS, "{text:?}");
        for id in 1..=JOBS {
            let found = format!("FOUND {id} {}\r\n{body}", text.len());
            server.expect(format!("peek {id}\r\n"), &found);
        }
    }
}

/// Its id is that of no job.
#[test]
fn a_damaged_record_of_a_key_is_not_reported_as_that_of_a_job() {
    let (disk, mut server) = start(OPTIONS);
    server.expect("put 0 0 9 1 idp:key\r\nx\r\n", "INSERTED 1\r\n");
    let mut files = disk.live_files();
    files.get_mut("binlog.1").unwrap()[FILE_HEAD_LEN + 20] ^= 1;
    let report = damage(&mut FakeDisk::with_files(&files)).expect("a record is damaged");
    let line = report.lines().find(|line| line.contains("damage at")).unwrap();
    assert!(line.ends_with("(84 bytes)"), "{report}");
}

/// The bodies are the deletes of all other jobs in another server's file.
#[test]
fn records_inside_a_body_are_not_replayed() {
    const PLAIN: usize = 100;
    let plain = [&b"plain"[..]; PLAIN];
    let end = FILE_HEAD_LEN + PLAIN * usize::try_from(record_len("default", 5)).unwrap();
    let (other, mut server) = file_with(plain);
    (1..=PLAIN as u64).for_each(|id| server.delete(id));
    let deletes = other.live_files()["binlog.1"][end..end + PLAIN * HEAD_LEN].to_vec();
    let (disk, _) = file_with(plain.into_iter().chain([&deletes[..], b"last"]));
    // The end of the body with the records is unknown.
    let length = (end + BODY_LEN_AT, 0x40);
    let mut again = start_with_flips(&disk, &[length]);
    assert_eq!(again.recovered.jobs, PLAIN as u64 + 1);
    again.expect("peek 101\r\n", "NOT_FOUND\r\n");
    again.expect("peek 102\r\n", "FOUND 102 4\r\nlast\r\n");
    // And so is the nonce of the file.
    let again = start_with_flips(&disk, &[NONCE, length]);
    assert!(again.recovered.jobs >= PLAIN as u64, "{:?}", again.recovered);
}

/// The head of the file and the first record are damaged: the nonce of the records is unknown.
#[test]
fn a_record_inside_a_damaged_body_hides_no_record_of_the_file() {
    let (other, _) = file_with([&b"other"[..]]);
    let end = FILE_HEAD_LEN + usize::try_from(record_len("default", 5)).unwrap();
    let forged = other.live_files()["binlog.1"][FILE_HEAD_LEN..end].to_vec();
    let (disk, _) = file_with([&forged[..]].into_iter().chain([&b"plain"[..]; 10]));
    let mut again = start_with_flips(&disk, &[NONCE, LENGTH]);
    for id in 2..=11 {
        again.expect(format!("peek {id}\r\n"), &format!("FOUND {id} 5\r\nplain\r\n"));
    }
}

/// The search for intact records costs at most as much as to read the file sixteen times. A file of heads would take
/// hours otherwise.
#[test]
fn a_damaged_body_full_of_record_heads_hides_no_later_record_or_the_search_ends() {
    // The beginnings of records of job 7 whose length claims a very long body.
    let heads = |count, body_len| {
        let body = vec![b'x'; body_len];
        let record = Record { id: 7, tube: "x", state: READY, body: &body, ..Record::default() };
        record.v7(None)[..HEAD_LEN + 1].repeat(count)
    };
    let few = heads(40, 60_000);
    let (disk, _) = file_with([&few[..]].into_iter().chain([&b"plain"[..]; 100]));
    assert_eq!(start_with_flips(&disk, &[]).recovered.jobs, 101);
    // The priority of the first job.
    let priority = FILE_HEAD_LEN + 4 + "default".len() + 8;
    assert_eq!(start_with_flips(&disk, &[(priority, 1)]).recovered.jobs, 100);
    let many = heads(300, 30_000);
    let (disk, _) = file_with([&many[..], &[b'x'; 35_000], b"last"]);
    assert_eq!(start_with_flips(&disk, &[NONCE]).recovered.jobs, 3);
    assert_eq!(start_with_flips(&disk, &[NONCE, LENGTH]).recovered.jobs, 0);
}
