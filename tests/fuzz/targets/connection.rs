//! A server with up to six clients that send any bytes in any pieces. The bytes of an input are decoded
//! to a history of the simulation, and its model judges every reply.
//!
//! The first byte chooses the setup. The rest is what clients send. [`ESCAPE`], a byte that no command
//! needs, introduces an event: the high half of the next byte is its kind, the low half a number for it.
//! So a conversation is a seed almost as it is, and a mutation of a few bytes changes a few events.

use super::{Bytes, check_log};
use crate::simulation::event::{Crash, Event, Setup};
use crate::simulation::shrink;
use std::fmt::Write;

/// Introduces an event; twice, it is the byte itself.
pub const ESCAPE: u8 = 0xff;

/// The kinds of events, and of what changes the next ones: they choose the client that sends, the pieces
/// in which its bytes arrive, and send the bytes since the last event again, or others.
pub mod op {
    pub const SELECT: u8 = 0x00;
    pub const END_ITERATION: u8 = 0x10;
    pub const ADVANCE: u8 = 0x20;
    pub const HALF_CLOSE: u8 = 0x30;
    pub const DISCONNECT: u8 = 0x40;
    pub const READ_LIMIT: u8 = 0x50;
    pub const DRAIN: u8 = 0x60;
    pub const PIECES: u8 = 0x70;
    pub const REPEAT: u8 = 0x80;
    pub const FILL: u8 = 0x90;
    pub const CLOCK_OFFSET: u8 = 0xa0;
    pub const ACKNOWLEDGE: u8 = 0xb0;
    pub const DISK_CAPACITY: u8 = 0xc0;
    pub const FAIL_DISK: u8 = 0xd0;
    pub const RESTART: u8 = 0xe0;
    pub const LOSE_LEADERSHIP: u8 = 0xf0;
}

const CLIENTS: usize = 6;
const SECOND: u64 = 1_000_000_000;
const SPANS: [u64; 8] =
    [1, SECOND / 1000, SECOND / 20, SECOND, 2 * SECOND, 3 * SECOND, 100 * SECOND, 10_000 * SECOND];
const ROOMS: [Option<usize>; 8] =
    [None, Some(0), Some(1), Some(7), Some(100), Some(3000), Some(70_000), None];
const PIECES: [usize; 8] = [0, 1, 2, 3, 7, 50, 225, 5000];
const FILLERS: [usize; 16] =
    [1, 2, 10, 100, 200, 222, 223, 224, 300, 1000, 4093, 4094, 4096, 17_000, 65_535, 65_537];

/// Options and limits of the server. The model does not allow flushes with reads in the background, nor
/// batches with searches in steps.
pub const SETUPS: [&str; 16] = [
    "setup 65535",
    "setup 10",
    "setup 65535 4096 0",
    "setup 65535 bury-after 1",
    "setup 65535 8192 0 bury-after 1",
    "setup 5000 65536 -",
    "setup 300 8192 50000000",
    "setup 300 8192 - limit 32768 body-cache 0",
    "setup 65535 16384 0 limit 65536",
    "setup 0 16384 10000000 body-cache 200",
    "setup 65535 4096 - remote 300 - false -",
    "setup 65535 16384 - remote 4000 3000 true 7",
    "setup 65535 kick-step 2 reserve-step 2 touch-step 3 shared-work 9 least-share 2",
    "setup 300 list-step 2 lists-sent 1 flush-work 9 read-bytes 20 shared-work 5",
    "setup 300 4096 0 jobs-compared 2 ids-looked-up 3 reserve-step 1 flush-work 1 kick-step 1",
    "setup 65535 8192 - remote 50 - true - touch-step 1 kick-step 3 least-share 1",
];

/// The most bytes that all clients send. The model is slow.
const MAX_SENT: usize = 100_000;
/// The most lines of puts: what is due at once must fit into one tick.
const MAX_PUTS: usize = 32;
/// The most pieces of the bytes between two events.
const MAX_PIECES: usize = 300;

pub fn run(bytes: &[u8]) {
    let (setup, history) = decode(bytes);
    judge(setup, &history);
}

/// Lets the model judge a history. One that fails is shortened, and printed as the simulation takes it.
pub fn judge(setup: Setup, history: &[Event]) {
    check_log();
    let Err(failure) = shrink::replay(setup, history) else { return };
    std::panic::set_hook(Box::new(|_| {}));
    let shortest = shrink::shrink(setup, history);
    let _ = std::panic::take_hook();
    let mut text = format!("{setup}\n");
    shortest.iter().for_each(|event| writeln!(text, "{event}").unwrap());
    panic!("{failure}\nthe shortest history found, for `make simulate HISTORY=FILE':\n\n{text}");
}

fn decode(bytes: &[u8]) -> (Setup, Vec<Event>) {
    let mut bytes = Bytes(bytes);
    let setup: Setup = bytes.one_of(&SETUPS).parse().expect("the table has setups");
    let mut history = History {
        may_lack_space: setup.bury_after.is_none(),
        file_size: setup.binlog.map_or(0, |binlog| binlog.file_size.into()),
        ..History::default()
    };
    let mut rest = bytes.0;
    while !rest.is_empty() && history.sent < MAX_SENT && history.puts < MAX_PUTS {
        let end = rest.iter().position(|&byte| byte == ESCAPE).unwrap_or(rest.len());
        history.unsent.extend_from_slice(&rest[..end]);
        rest = match &rest[end..] {
            [_, what, rest @ ..] => {
                history.add(what & 0xf0, what & 0x0f);
                rest
            }
            _ => &[],
        };
    }
    history.end();
    (setup, history.events)
}

#[derive(Default)]
struct History {
    /// Without space for the record of its bury, a job is ready: the model does not know that.
    may_lack_space: bool,
    file_size: u64,
    events: Vec<Event>,
    /// The client that sends.
    client: usize,
    /// The bytes since the last event.
    unsent: Vec<u8>,
    /// 0: all bytes are one piece.
    piece_len: usize,
    sent: usize,
    puts: usize,
}

impl History {
    fn add(&mut self, kind: u8, number: u8) {
        let index = usize::from(number);
        let most = (MAX_SENT - self.sent).saturating_sub(self.unsent.len());
        match kind {
            op::LOSE_LEADERSHIP if number == 0x0f => return self.unsent.push(ESCAPE),
            op::REPEAT => {
                let puts = MAX_PUTS.saturating_sub(self.puts) / puts_in(&self.unsent).max(1);
                let count = (1 << index.min(9)).min(most / self.unsent.len().max(1)).min(puts);
                self.unsent = self.unsent.repeat(count.max(1));
                return;
            }
            op::FILL => {
                let len = self.unsent.len() + FILLERS[index].min(most);
                return self.unsent.resize(len, b'x');
            }
            _ => self.send(),
        }
        let client = self.client;
        let is_even = index.is_multiple_of(2);
        self.events.push(match kind {
            op::SELECT => return self.client = index % CLIENTS,
            op::PIECES => return self.piece_len = PIECES[index % PIECES.len()],
            op::END_ITERATION => Event::EndIteration,
            op::ADVANCE => match SPANS.get(index) {
                Some(&span) => Event::Advance(span),
                None if index < 12 => Event::Suspend(SPANS[index - 8]),
                None => Event::AdvanceUntilDue,
            },
            op::HALF_CLOSE => Event::HalfClose(client, is_even),
            op::DISCONNECT => Event::Disconnect(client),
            op::READ_LIMIT => Event::ReadLimit(client, ROOMS[index % ROOMS.len()]),
            op::DRAIN => Event::Drain(is_even),
            op::CLOCK_OFFSET => Event::ClockOffset((i64::from(number) - 8) * 400_000_000_000),
            op::ACKNOWLEDGE => Event::Acknowledge(if index == 15 { usize::MAX } else { index }),
            op::DISK_CAPACITY if self.may_lack_space => {
                let bytes = self.file_size * u64::from(number + 1) / 2;
                Event::DiskCapacity((number < 15).then_some(bytes))
            }
            op::FAIL_DISK if self.may_lack_space => {
                Event::FailDiskAfter(number.into(), crash(number))
            }
            op::RESTART if number == 0 => Event::Restart,
            op::RESTART => Event::Crash(crash(number)),
            op::LOSE_LEADERSHIP => Event::LoseLeadership(number.into()),
            _ => return,
        });
    }

    fn send(&mut self) {
        let bytes = std::mem::take(&mut self.unsent);
        if bytes.is_empty() {
            return;
        }
        self.sent += bytes.len();
        self.puts += puts_in(&bytes);
        let len = if self.piece_len > 0 { self.piece_len } else { bytes.len() };
        let len = len.max(bytes.len() / MAX_PIECES);
        self.events.push(Event::Connect(self.client));
        self.events.extend(bytes.chunks(len).map(|part| Event::Send(self.client, part.to_vec())));
    }

    /// All clients read to the end, and then send nothing more: all connections must end.
    fn end(&mut self) {
        self.send();
        self.events.extend((0..CLIENTS).map(|client| Event::ReadLimit(client, None)));
        let settle = [Event::Acknowledge(usize::MAX), Event::Advance(SECOND)];
        self.events.extend(settle.clone());
        self.events.extend((0..CLIENTS).map(|client| Event::HalfClose(client, true)));
        self.events.extend(settle.clone());
        self.events.extend([Event::Connect(0), Event::Send(0, b"stats\r\nlist-tubes\r\n".into())]);
        self.events.extend(settle);
    }
}

fn puts_in(bytes: &[u8]) -> usize {
    bytes.windows(3).filter(|word| word == b"put").count()
}

/// Every other crash is a power cut, and few of them flip bits.
fn crash(number: u8) -> Crash {
    let power_cut = number.is_multiple_of(2).then_some(number.into());
    Crash { power_cut, flipped_bits: u32::from(number >= 12) }
}
