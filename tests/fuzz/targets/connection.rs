//! A server with up to six clients that send any bytes in any pieces. An input is a history of the
//! simulation as text, behind a byte that chooses the setup. The model of the simulation judges every
//! reply.

use super::{Bytes, check_log};
use crate::simulation::event::{Crash, Event, Setup};
use crate::simulation::shrink;

const CLIENTS: usize = 6;
const SECOND: u64 = 1_000_000_000;

/// Options and limits of the server. The model does not allow flushes with reads in the background, nor
/// batches with searches in steps.
pub const SETUPS: [&str; 16] = [
    "setup 65535",
    "setup 10",
    "setup 65535 file-size 4096 sync-within 0",
    "setup 65535 bury-after 1",
    "setup 65535 file-size 8192 sync-within 0 bury-after 1",
    "setup 5000 file-size 65536",
    "setup 300 file-size 8192 sync-within 50000000",
    "setup 300 file-size 8192 limit 32768 body-cache 0",
    "setup 65535 file-size 16384 sync-within 0 limit 65536",
    "setup 0 file-size 16384 sync-within 10000000 body-cache 200",
    "setup 65535 file-size 4096 chunk-len 300",
    "setup 65535 file-size 16384 chunk-len 4000 congested-above 3000 eager 7",
    "setup 65535 kick-step 2 batch-step 2 touch-step 3 shared-work 9 least-share 2",
    "setup 300 list-step 2 lists-sent 1 flush-work 9 read-bytes 20 shared-work 5",
    "setup 300 file-size 4096 sync-within 0 jobs-compared 2 ids-looked-up 3 batch-step 1 \
     flush-work 1 kick-step 1",
    "setup 65535 file-size 8192 chunk-len 50 touch-step 1 kick-step 3 least-share 1",
];

/// The most bytes that all clients send. The model is slow.
const MAX_SENT: usize = 100_000;
/// The most lines of puts: what is due at once must fit into one tick.
const MAX_PUTS: usize = 32;
/// The most events: each may take several iterations.
const MAX_EVENTS: usize = 400;

pub fn run(bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    let setup: Setup = bytes.one_of(&SETUPS).parse().expect("the table has setups");
    judge(setup, &decode(setup, &String::from_utf8_lossy(bytes.0)));
}

/// Lets the model judge a history. One that fails is shortened, and printed as the simulation takes it.
fn judge(setup: Setup, history: &[Event]) {
    check_log();
    if shrink::replay(setup, history).is_err() {
        let (text, failure) = shrink::shortest(setup, history);
        panic!("{failure}\nthe shortest history, for `make simulate HISTORY=FILE':\n\n{text}");
    }
}

/// Returns the events of a text. Lines that are none are left out. At the end all clients read all
/// replies, and then send nothing more: all connections must end.
fn decode(setup: Setup, text: &str) -> Vec<Event> {
    let (mut history, mut sent, mut puts) = (Vec::new(), 0, 0);
    for event in text.lines().filter_map(|line| bounded(setup, line.parse().ok()?)) {
        if let Event::Send(client, bytes) = &event {
            sent += bytes.len();
            puts += bytes.windows(3).filter(|word| word == b"put").count();
            history.push(Event::Connect(*client));
        }
        if sent > MAX_SENT || puts > MAX_PUTS || history.len() > MAX_EVENTS {
            break;
        }
        history.push(event);
    }
    let settle = [Event::Acknowledge(usize::MAX), Event::Advance(SECOND)];
    history.extend((0..CLIENTS).map(|client| Event::ReadLimit(client, None)));
    history.extend(settle.clone());
    history.extend((0..CLIENTS).map(|client| Event::HalfClose(client, true)));
    history.extend(settle.clone());
    history.extend([Event::Connect(0), Event::Send(0, b"stats\r\nlist-tubes\r\n".into())]);
    history.extend(settle);
    history
}

/// Returns an event with a client that there is and numbers that a run can have, or `None` for one that
/// the model does not allow.
#[allow(clippy::wildcard_enum_match_arm, reason = "all other events are allowed as they are")]
fn bounded(setup: Setup, event: Event) -> Option<Event> {
    // Without space for the record of its bury, a job is ready: the model does not know that.
    let may_lack_space = setup.bury_after.is_none();
    let few_bits = |crash: Crash| Crash { flipped_bits: crash.flipped_bits.min(1), ..crash };
    Some(match event {
        Event::Connect(client) => Event::Connect(client % CLIENTS),
        Event::Send(client, bytes) => Event::Send(client % CLIENTS, bytes),
        Event::HalfClose(client, is_reported) => Event::HalfClose(client % CLIENTS, is_reported),
        Event::Disconnect(client) => Event::Disconnect(client % CLIENTS),
        Event::ReadLimit(client, limit) => Event::ReadLimit(client % CLIENTS, limit),
        Event::Advance(span) => Event::Advance(span % (10_000 * SECOND)),
        Event::Suspend(span) => Event::Suspend(span % (10_000 * SECOND)),
        Event::ClockOffset(offset) => Event::ClockOffset(offset % 3_200_000_000_000),
        Event::DiskCapacity(_) | Event::FailDiskAfter(..) if !may_lack_space => return None,
        Event::FailDiskAfter(changes, crash) => Event::FailDiskAfter(changes, few_bits(crash)),
        Event::FailSyncsAfter(syncs, crash) => Event::FailSyncsAfter(syncs, few_bits(crash)),
        Event::FailReads(count) => Event::FailReads(count % 8),
        Event::Crash(crash) => Event::Crash(few_bits(crash)),
        other => other,
    })
}
