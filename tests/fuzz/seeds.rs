//! Seeds of the mutations: the conversations of `tests/conversations`, inputs for states that these do not
//! reach, and random programs.

use crate::harness::driver::Settings;
use crate::harness::script::{self, Line, Script};
use crate::targets::connection::{ESCAPE, SETUPS, op};
use std::collections::BTreeSet;

pub(crate) fn of(target: &str) -> Vec<Vec<u8>> {
    match target {
        "command" => lines(),
        "connection" => {
            script::all().iter().map(input_of).chain(INPUTS.lines().map(parsed)).collect()
        }
        "replay" => programs(),
        "options" => COMMAND_LINES.map(|line| line.replace(' ', "\0").into_bytes()).to_vec(),
        _ => panic!("there is no target {target}"),
    }
}

fn lines() -> Vec<Vec<u8>> {
    let mut lines = BTreeSet::new();
    for (_, line) in script::all().into_iter().flat_map(|script| script.lines) {
        if let Line::Send { bytes, .. } = line {
            let sent = bytes.split(|&byte| byte == b'\n');
            lines.extend(sent.map(|line| line.trim_ascii_end().to_vec()));
        }
    }
    lines.into_iter().collect()
}

/// The words of commands and those of their arguments, with the spaces between them.
pub(crate) fn words() -> [Vec<Vec<u8>>; 2] {
    let mut words = [BTreeSet::new(), BTreeSet::new()];
    let flags = COMMAND_LINES.map(|line| line.as_bytes().to_vec());
    for line in lines().iter().chain(&flags) {
        for (place, word) in line.split_inclusive(|&byte| byte == b' ').enumerate() {
            words[place.min(1)].insert(word.to_vec());
        }
    }
    words.map(|words| words.into_iter().filter(|word| (1..24).contains(&word.len())).collect())
}

/// Arguments with spaces between them.
const COMMAND_LINES: [&str; 9] = [
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

// ---- Conversations ----

/// Returns a script in the form of the target `connection`.
fn input_of(script: &Script) -> Vec<u8> {
    let settings = script.settings(Settings::DEFAULT);
    let setup = match (script.has_binlog, settings.max_job_size, settings.bury_after) {
        (true, _, Some(_)) => "setup 65535 8192 0 bury-after 1",
        (true, _, None) => "setup 65535 4096 0",
        (false, _, Some(_)) => "setup 65535 bury-after 1",
        (false, 0..=1000, None) => "setup 10",
        (false, _, None) => "setup 65535",
    };
    let setup = SETUPS.iter().position(|known| *known == setup).expect("it is in the table");
    let mut input = vec![u8::try_from(setup).expect("the table is short")];
    let mut names: Vec<&str> = Vec::new();
    for (_, line) in &script.lines {
        if let Line::Send { client, .. } | Line::HalfClose { client } | Line::HangUp { client } =
            line
        {
            let known = names.iter().position(|name| name == client);
            names.extend(known.is_none().then_some(&**client));
            let number = known.unwrap_or(names.len() - 1);
            input.extend([ESCAPE, op::SELECT + u8::try_from(number % 6).expect("it is small")]);
        }
        let event = match line {
            Line::Send { bytes, .. } => {
                for &byte in bytes {
                    input.extend([byte].repeat(if byte == ESCAPE { 2 } else { 1 }));
                }
                op::END_ITERATION
            }
            Line::Expect { .. } | Line::ExpectNothing { .. } => continue,
            Line::HalfClose { .. } => op::HALF_CLOSE,
            Line::HangUp { .. } => op::DISCONNECT,
            Line::Drain => op::DRAIN,
            Line::Restart { is_crash } => op::RESTART + u8::from(*is_crash),
            // 50 ms, or one to three seconds.
            Line::Advance { span } => op::ADVANCE + 2 + span.as_secs().min(3) as u8,
        };
        input.extend([ESCAPE, event]);
    }
    input
}

/// Inputs for what no script does: outputs that no client reads, bodies and long lines in pieces,
/// binlogs that are compacted, full, failing and remote disks. The first number is the setup. Two hex
/// digits between bars are the byte after an escape, and `$` is an end of a line.
const INPUTS: &str = "\
00|put 0 9 9 0$$|85|10|kick 9999$|10|01|list-tubes$|10|00|reserve$|86|2c|
0c|put 0 0 2 0$$|84|reserve-batch 9$|82|01|flush-tube default$|00|touch-all$kick 9$|2c|
02|use a$put 0 0 9 0$$|84|10|01|flush-tube a$|41|02|flush-buried a$|10|e1|
0e|put 0 0 9 0$$|84|10|delete-batch 1 2 3 3$list-jobs default any 9 3$|e1|
00|51|put 0 0 9 4094$|9b|$|10|peek 1$|87|23|52|10|10|53|10|57|23|
02|51|put 0 0 9 65535$|9e|$|10|reserve$peek 1$|84|23|55|23|delete 1$|10|
00|77|put 0 0 9 17000$|9d|$|73|put 0 0 9 1000$|99|$stats-job 1$|10|
05|put 0 0 9 5000$|99|10|99|99|99|99|$put 0 0 9 5001$|9b|10|99|90|$|10|
00|71|9e|$|76|use |9e|$|72|put 0 0 1 0 idp:|99|$$|10|
02|put 0 0 9 100$|93|$|84|10|reserve$release 1 0 0$|87|23|e0|reserve$|10|e1|
07|put 0 0 9 222$|95|$|84|10|reserve$|82|bury 1 0$delete 2$|23|kick 9$|e1|
08|put 9 0 9 4093$|9a|$|83|10|c2|84|10|delete 1$|d3|put 0 0 9 1$x$|10|e0|
0b|put 0 0 9 100$|93|$|84|10|b3|delete 1$|10|b1|bf|10|f3|put 0 0 9 1$x$|10|e2|
0d|reserve$|10|01|reserve-with-timeout 3$|10|02|watch a$reserve$|10|25|30|
00|pause-tube a 2$reserve$|01|put-in-tube a 0 0 1 0$$|10|25|put 0 0 1 1$x$|10|30|";

fn parsed(line: &str) -> Vec<u8> {
    let mut input = Vec::new();
    for (index, part) in line.split('|').enumerate() {
        match u8::from_str_radix(part, 16) {
            Ok(setup) if index == 0 => input.push(setup),
            Ok(what) if part.len() == 2 => input.extend([ESCAPE, what]),
            _ => input.extend(part.replace('$', "\r\n").bytes()),
        }
    }
    input
}

/// Random programs that write binlog files.
fn programs() -> Vec<Vec<u8>> {
    let mut random = fastrand::Rng::with_seed(7);
    let program = |_| {
        let mut program = vec![random.u8(..), random.u8(..) & 0xfe];
        program.extend((0..random.usize(..400)).map(|_| random.u8(..)));
        program
    };
    (0..60).map(program).collect()
}
