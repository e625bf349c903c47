//! Seeds of the mutations: the conversations of `tests/conversations`, the files of `tests/fixtures`,
//! and inputs for states that neither reaches.

use crate::harness::engine::{Instance, Policy};
use crate::harness::fake_disk::{FakeDisk, Files};
use crate::harness::fixtures::START;
use crate::harness::script::{self, Line, Script};
use crate::targets::connection::{ESCAPE, op};
use crate::targets::replay::{
    HEAD_LEN, KEY_ID, NEXT_FILE, NONCE_AT, PROGRAM, REPAIRED, record_len, repaired,
};
use beanstalkd::testing::Nanos;
use std::path::Path;

/// Returns the seeds of a target.
pub(crate) fn of(target: &str) -> Vec<Vec<u8>> {
    match target {
        "command" => lines(),
        "connection" => conversations(),
        "replay" => directories(),
        "options" => command_lines(),
        _ => panic!("there is no target {target}"),
    }
}

fn lines() -> Vec<Vec<u8>> {
    let mut lines = Vec::new();
    for (_, line) in script::all().into_iter().flat_map(|script| script.lines) {
        if let Line::Send { bytes, .. } = line {
            lines.extend(
                bytes.split(|&byte| byte == b'\n').map(|line| line.trim_ascii_end().to_vec()),
            );
        }
    }
    lines.sort();
    lines.dedup();
    lines
}

fn command_lines() -> Vec<Vec<u8>> {
    let lines = [
        "-l 127.0.0.1 -p 11300 -b jobs -f 0 -s 4097 -z 1073741825 -u nobody -VVV -c -n",
        "-Fl unix:socket",
        "--listen=::1 --port 0 --max-job-size=10 --no-fsync --verbose",
        "--check -b jobs",
        "--dump --binlog-dir=jobs",
        "-h",
        "-v",
        "-p11300 what",
        "-f 4294967295 -s 0 -s 4294967295",
    ];
    lines.iter().map(|line| line.replace(' ', "\0").into_bytes()).collect()
}

// ---- Conversations ----

fn conversations() -> Vec<Vec<u8>> {
    let played = script::all().into_iter().map(|script| input_of(&script));
    played.chain(long_inputs()).collect()
}

/// Returns a script in the form of the target `connection`.
fn input_of(script: &Script) -> Vec<u8> {
    let size = match script.settings().max_job_size {
        0..=1000 => 1,
        1001..=10_000 => 2,
        _ => 0,
    };
    let mut input = vec![size | if script.has_binlog { 8 } else { 0 }];
    let mut names: Vec<&str> = Vec::new();
    for (_, line) in &script.lines {
        match line {
            Line::Send { client, bytes } => {
                input.extend(select(client, &mut names));
                let escaped =
                    bytes.iter().flat_map(|&byte| vec![byte; if byte == ESCAPE { 2 } else { 1 }]);
                input.extend(escaped);
                input.extend([ESCAPE, op::ITERATE]);
            }
            Line::Expect { .. } | Line::ExpectNothing { .. } => {}
            Line::HalfClose { client } => {
                input.extend(select(client, &mut names));
                input.extend([ESCAPE, op::SHUT, ESCAPE, op::ITERATE]);
            }
            Line::HangUp { client } => {
                input.extend(select(client, &mut names));
                input.extend([ESCAPE, op::DISCONNECT]);
            }
            Line::Drain => input.extend([ESCAPE, op::DRAIN]),
            Line::Restart { is_crash } => {
                input.extend([ESCAPE, op::RESTART + u8::from(*is_crash)]);
            }
            Line::Advance { span } => {
                let how = [(1_000, 2), (2_000, 3)];
                let how = how.iter().find(|(millis, _)| span.as_millis() < *millis);
                input.extend([ESCAPE, op::ADVANCE + how.map_or(4, |(_, how)| *how)]);
            }
        }
    }
    input
}

fn select<'n>(client: &'n str, names: &mut Vec<&'n str>) -> [u8; 2] {
    let place = names.iter().position(|name| *name == client).unwrap_or_else(|| {
        names.push(client);
        names.len() - 1
    });
    [ESCAPE, op::SELECT + u8::try_from(place % 6).expect("it is less than 6")]
}

/// Inputs that are too long for a script: kicks and hang-ups in steps, outputs that no client reads,
/// bodies in pieces, binlogs that are compacted, full disks.
fn long_inputs() -> Vec<Vec<u8>> {
    // Two hex digits between bars are the byte after an escape.
    let inputs = [
        // Kicks and hang-ups of thousands.
        (
            0x00,
            "put 0 9 9 0\r\n\r\n|8c|10|kick 9999\r\n|10|01|list-tubes\r\n|10|00|reserve\r\n|8c|30|a0|",
        ),
        (0x00, "put 0 0 9 0\r\n\r\n|8c|reserve\r\n|8c|a0|40|10|2b|a0|"),
        (0x00, "put 0 1 9 0\r\n\r\n|8c|a0|23|10|2b|01|reserve-with-timeout 1\r\n|10|23|"),
        (0x00, "put 0 0 1 0\r\n\r\n|8c|reserve\r\n|8c|a0|2b|"),
        // No client reads.
        (0x00, "|51|put 0 0 9 4094\r\n|9b|\r\n|10|peek 1\r\n|87|a0|52|10|10|53|10|57|a0|"),
        (
            0x00,
            "|54|put 0 0 9 4094\r\n|9b|\r\n|10|reserve\r\nstats\r\npeek 1\r\nstats\r\n|85|10|55|a0|",
        ),
        (0x00, "|51|stats\r\n|89|10|01|list-tubes\r\n|70|88|10|00|56|10|10|10|"),
        (
            0x00,
            "|51|put 0 0 9 65535\r\n|9e|\r\n|10|reserve\r\npeek 1\r\n|86|a0|55|a0|delete 1\r\n|10|",
        ),
        // Large bodies in pieces, in the wrong place, and too large ones.
        (
            0x00,
            "put 0 0 9 17000\r\n|9c|10|9c|10|9c|10|9c|10|98|98|92|91|91|91|10|\r\nstats-job 1\r\n|10|",
        ),
        (0x20, "put 0 0 9 65535\r\n|9d|10|40|put 0 0 9 65536\r\n|9e|10|90|\r\n|10|"),
        (
            0x62,
            "put 0 0 9 5000\r\n|99|99|10|99|99|99|\r\nput 0 0 9 5001\r\n|99|99|99|99|99|10|90|\r\n|10|",
        ),
        // A binlog of small files, one that is full, restarts.
        (
            0x08,
            "put 0 0 9 100\r\n|93|\r\n|86|10|reserve\r\nrelease 1 0 0\r\n|88|a0|23|b0|reserve\r\n|10|b1|",
        ),
        (
            0x18,
            "put 0 0 9 222\r\n|95|\r\n|87|10|reserve\r\n|82|bury 1 0\r\ndelete 2\r\n|a0|kick 9\r\n|b1|",
        ),
        (
            0x1c,
            "put 9 0 9 4093\r\n|9a|\r\n|86|10|delete 1\r\ndelete 2\r\n|10|23|put 0 0 9 1\r\nx\r\n|b0|",
        ),
        (
            0x08,
            "use a\r\nput 0 5 9 0\r\n\r\n|88|10|kick 300\r\n|a0|24|23|b1|use a\r\nkick 9\r\n|10|b0|",
        ),
        (
            0x0c,
            "put 0 0 1 17000\r\n|9d|\r\n|84|10|reserve\r\n|83|24|release 1 5 5\r\n|10|23|b1|24|",
        ),
        // All ends of a wait.
        (
            0x00,
            "reserve\r\n|10|01|reserve-with-timeout 3\r\n|10|02|watch a\r\nignore default\r\nreserve\r\n|10|\
                03|put 0 0 1 1\r\nx\r\nuse a\r\nput 0 0 1 0\r\n\r\n|10|24|pause-tube a 2\r\n|10|24|30|",
        ),
    ];
    let input = |(mode, text): &(u8, &str)| {
        let mut input = vec![*mode];
        for part in text.split('|') {
            match u8::from_str_radix(part, 16) {
                Ok(what) if part.len() == 2 => input.extend([ESCAPE, what]),
                _ => input.extend_from_slice(part.as_bytes()),
            }
        }
        input
    };
    inputs.iter().chain(&inputs_of_many_jobs()).map(input).collect()
}

/// Inputs whose commands are about many jobs at once.
fn inputs_of_many_jobs() -> [(u8, &'static str); 6] {
    [
        // Flushes of thousands, of which one client goes away, and a restart in the middle.
        (
            0x00,
            "use a\r\nput 0 0 9 0\r\n\r\n|8b|10|01|flush-tube a\r\n|10|02|list-tubes\r\n|10|a0|",
        ),
        (
            0x08,
            "use a\r\nput 0 0 9 0\r\n\r\n|8a|10|01|flush-tube a\r\n|10|41|02|flush-buried a\r\nlist-tubes\r\n|10|b1|",
        ),
        (
            0x00,
            "put 0 0 1 0\r\n\r\n|8b|reserve-batch 1000\r\n|82|01|flush-tube default\r\n|a0|00|touch-all\r\n|a0|2b|",
        ),
        // Batches with large bodies and pages of thousands.
        (
            0x00,
            "put 0 0 9 65535\r\n|9e|\r\n|84|a0|peek-batch default any 1000\r\nreserve-batch 1000\r\n|a0|",
        ),
        (
            0x00,
            "put 0 9 9 0\r\n\r\n|8c|a0|list-jobs default any 1000 3000\r\nlist-jobs default buried 1\r\n|a0|",
        ),
        (0x08, "put 0 0 9 0\r\n\r\n|89|a0|delete-batch 1 2 3 3\r\ntouch-all\r\n|a0|b1|"),
    ]
}

// ---- Directories ----

fn directories() -> Vec<Vec<u8>> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/c-1.12");
    let read = |name: &str| std::fs::read(fixtures.join(name)).expect("a fixture can be read");
    let mut directories = vec![
        directory(0, [read("records/binlog.1")]),
        directory(0, [read("moved/binlog.23"), read("moved/binlog.24")]),
    ];
    for script in script::all().into_iter().filter(|script| script.has_binlog) {
        let files = fixed(binlog_of(&script).into_values().take(4).collect());
        directories.push(directory(REPAIRED, files));
    }
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..40 {
        let mut program = vec![PROGRAM | random.u8(..) & !REPAIRED, random.u8(..) & 0xfe];
        program.extend((0..random.usize(..400)).map(|_| random.u8(..)));
        directories.push(program);
    }
    directories
}

/// Returns the files with other numbers in the place of those that the server has drawn at random: the
/// nonces, the secret, and the digests of keys. So each run of the tests has the same inputs.
fn fixed(mut files: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    /// No program uses it: a program that writes these bytes as they are forges no record.
    const NONCE: [u8; 4] = *b"seed";
    const SECRET_AT: usize = 16;
    const DIGEST_AT: usize = 56;
    let mut digests: Vec<[u8; 16]> = Vec::new();
    for file in &mut files {
        let mut at = 4;
        while let Some(len) = record_len(file.get(at..).unwrap_or_default()) {
            let name_len = usize::from(file[at]);
            let fields = &mut file[at + 4 + name_len..at + HEAD_LEN + name_len];
            fields[NONCE_AT..][..4].copy_from_slice(&NONCE);
            if fields[..8] == KEY_ID.to_ne_bytes() {
                fields[SECRET_AT..][..16].fill(9);
                let digest = fields[DIGEST_AT..][..16].try_into().expect("it has 16 bytes");
                let known = digests.iter().position(|&other| other == digest);
                let number = known.unwrap_or_else(|| {
                    digests.push(digest);
                    digests.len() - 1
                });
                let number = u8::try_from(number).expect("scripts have few keys");
                fields[DIGEST_AT..][..16].fill(number);
            }
            at += len;
        }
        *file = repaired(file);
    }
    files
}

/// Returns files in the form of the target `replay`.
fn directory(mode: u8, files: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
    let mut bytes = vec![mode, 0];
    for (place, mut file) in files.into_iter().enumerate() {
        if place > 0 {
            bytes.extend_from_slice(NEXT_FILE);
        }
        // The mode adds zeros at the end.
        let len = file.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
        file.truncate(len);
        bytes.extend(file);
    }
    bytes
}

/// The files of a server that is killed at the end of the script.
fn binlog_of(script: &Script) -> Files {
    let disk = FakeDisk::default();
    let mut server = Instance::start(&disk, Policy::synced(4096), START);
    let conn = server.conn;
    for (_, line) in &script.lines {
        match line {
            Line::Send { bytes, .. } if server.server.actions(conn).read => {
                server.ask(bytes);
            }
            Line::Advance { span } => {
                let span = u64::try_from(span.as_nanos()).expect("scripts are short");
                server.advance(Nanos::from_nanos(span));
                server.tick();
                server.commit();
            }
            Line::Send { .. }
            | Line::Expect { .. }
            | Line::ExpectNothing { .. }
            | Line::HalfClose { .. }
            | Line::HangUp { .. }
            | Line::Drain
            | Line::Restart { .. } => {}
        }
    }
    disk.live_files()
}
