//! A server with up to six clients that send any bytes in any pieces, and read in any steps.
//!
//! The first byte chooses how the server runs. The rest is what the clients send. [`ESCAPE`], a byte
//! that no command needs, introduces an action of the next byte: another client, another piece,
//! time, a disconnect. So a conversation is a seed almost as it is, and mutations of its bytes stay
//! conversations.
//!
//! `talk.rs` judges the replies to each client, `Host` the rest. Then the bytes of one client are
//! sent again, alone, in one piece and in many: the replies must be the same.

use super::talk::{Ledger, Talk};
use super::{Bytes, check_log};
use crate::harness::engine::Engine;
use crate::harness::fake_disk::FakeDisk;
use crate::harness::fixtures::START;
use crate::harness::yaml::number;
use beanstalkd::testing::{ConnKey, Nanos, ReplayError, Settings, Syncing};
use std::io::IoSlice;

/// Introduces one of the [`op`]s; twice, it is the byte itself.
pub const ESCAPE: u8 = 0xff;

/// The high half of the byte after an [`ESCAPE`]. The low half is a number for it.
pub mod op {
    /// Selects another client.
    pub const SELECT: u8 = 0x00;
    /// Runs an iteration of the loop.
    pub const ITERATE: u8 = 0x10;
    /// Time passes: see `SPANS`.
    pub const ADVANCE: u8 = 0x20;
    /// The client shuts down its sending side.
    pub const SHUT: u8 = 0x30;
    /// The client disconnects.
    pub const DISCONNECT: u8 = 0x40;
    /// From now on the client reads this much in an iteration: see `READS`.
    pub const READ: u8 = 0x50;
    /// The server drains.
    pub const DRAIN: u8 = 0x60;
    /// The budget is shared among this number of connections: see `SHARES`.
    pub const SHARE: u8 = 0x70;
    /// The piece is sent up to 4096 times more.
    pub const REPEAT: u8 = 0x80;
    /// This number of bytes is sent: see `FILLERS`.
    pub const FILL: u8 = 0x90;
    /// Iterations run until no connection has anything to do.
    pub const SETTLE: u8 = 0xa0;
    /// With a binlog: the server stops or crashes, and starts again.
    pub const RESTART: u8 = 0xb0;
}

const CLIENTS: usize = 6;
const SPANS: [Nanos; 8] = [
    Nanos::from_nanos(1),
    Nanos::from_millis(1),
    Nanos::from_millis(400),
    Nanos::from_secs(1),
    Nanos::from_secs(3),
    Nanos::from_secs(100),
    Nanos::from_secs(100_000),
    Nanos::from_secs(u32::MAX),
];
const READS: [usize; 8] = [usize::MAX, 0, 1, 7, 100, 3000, 65_536, usize::MAX];
const SHARES: [usize; 4] = [1, 10, 64, 1000];
const FILLERS: [usize; 16] =
    [1, 2, 10, 100, 200, 222, 223, 224, 300, 1000, 4093, 4094, 4096, 17_000, 65_535, 65_537];
const MAX_JOB_SIZES: [u32; 4] = [65_535, 10, 5000, 0];

/// The output limit of a connection, in addition to one reply.
const OUTPUT_LIMIT: usize = 256 * 1024;
/// The longest reply with many jobs: their bodies, and a line for each.
const BATCH_LEN: usize = (1 << 20) + 1_000 * 200;
/// The most bytes that all clients together send and receive.
const SENT_LIMIT: usize = 200_000;
const RECEIVED_LIMIT: usize = 6 << 20;
/// The most iterations of a kick or a disconnect, for each byte sent.
const ITERATIONS_PER_BYTE: usize = 16;

/// Judges any clients.
pub fn run(bytes: &[u8]) {
    check_log();
    let mut bytes = Bytes(bytes);
    let mode = bytes.byte();
    let mut host = Host::new(mode);
    let mut input = bytes.0;
    while !input.is_empty() && !host.is_enough() {
        let end = input.iter().position(|&byte| byte == ESCAPE).unwrap_or(input.len());
        host.send(&input[..end]);
        input = &input[end..];
        if let [ESCAPE, what, rest @ ..] = input {
            host.perform(*what);
            input = rest;
        } else {
            break;
        }
    }
    let first = std::mem::take(&mut host.clients[0].all_sent);
    if !host.is_enough() {
        host.end();
    }
    if first.len() <= 60_000 {
        compare_pieces(&first, mode);
    }
}

/// The event loop of the server, and the network.
struct Host {
    engine: Engine,
    settings: Settings,
    disk: Option<FakeDisk>,
    syncing: Syncing,
    clients: Vec<Client>,
    /// The selected client.
    selected: usize,
    /// What [`op::REPEAT`] sends again.
    piece: Vec<u8>,
    ledger: Ledger,
    sent_len: usize,
    received_len: usize,
}

struct Client {
    /// None while it is not connected.
    key: Option<ConnKey>,
    talk: Talk,
    /// On its way to the server.
    sent: Vec<u8>,
    all_sent: Vec<u8>,
    is_shut_passed_on: bool,
    is_end_passed_on: bool,
    reads: usize,
    /// Bytes that the server received, and calls of `resume`.
    given: usize,
    resumes: usize,
}

impl Client {
    fn new(max_job_size: u32) -> Client {
        Client {
            key: None,
            talk: Talk::new(max_job_size),
            sent: Vec::new(),
            all_sent: Vec::new(),
            is_shut_passed_on: false,
            is_end_passed_on: false,
            reads: usize::MAX,
            given: 0,
            resumes: 0,
        }
    }
}

impl Host {
    fn new(mode: u8) -> Host {
        let max_job_size = MAX_JOB_SIZES[usize::from(mode & 3)];
        let (has_binlog, file_size, syncing) = match mode >> 2 & 3 {
            0 | 1 => (false, 0, Syncing::Never),
            2 => (true, 4096, Syncing::EachIteration),
            _ => (true, 65_536, Syncing::Within(Nanos::from_millis(50))),
        };
        let settings = Settings { max_job_size, binlog_file_size: file_size, ..Settings::DEFAULT };
        let disk = has_binlog.then(FakeDisk::default);
        let is_small = has_binlog && mode & 0x10 > 0;
        if let Some(disk) = &disk {
            disk.set_capacity(is_small.then(|| u64::from(file_size) * 4));
        }
        let clients = (0..CLIENTS).map(|_| Client::new(max_job_size)).collect();
        let mut ledger = Ledger::default();
        ledger.may_lack_space = is_small;
        let mut host = Host {
            engine: Engine::new(settings, START),
            settings,
            disk,
            syncing,
            clients,
            selected: 0,
            piece: Vec::new(),
            ledger,
            sent_len: 0,
            received_len: 0,
        };
        host.recover();
        host
    }

    fn is_enough(&self) -> bool {
        self.sent_len > SENT_LIMIT || self.received_len > RECEIVED_LIMIT
    }

    // ---- Actions ----

    fn send(&mut self, bytes: &[u8]) {
        self.sent_len += bytes.len();
        self.piece.extend_from_slice(bytes);
        let engine = &mut self.engine;
        let client = &mut self.clients[self.selected];
        client.key.get_or_insert_with(|| engine.connect());
        if !client.talk.is_shut {
            client.sent.extend_from_slice(bytes);
            client.all_sent.extend_from_slice(bytes);
        }
    }

    fn perform(&mut self, what: u8) {
        let how = usize::from(what & 0x0f);
        match what & 0xf0 {
            op::SELECT => self.selected = how % CLIENTS,
            op::ITERATE => {
                self.iterate();
            }
            op::ADVANCE => self.advance(SPANS[how % SPANS.len()], how >= SPANS.len()),
            op::SHUT => self.clients[self.selected].talk.is_shut = true,
            op::DISCONNECT => self.disconnect(self.selected),
            op::READ => self.clients[self.selected].reads = READS[how % READS.len()],
            op::DRAIN if how == 0 => self.engine.server.set_draining(true),
            op::SHARE => self.engine.server.share_budget(SHARES[how % SHARES.len()]),
            op::REPEAT => {
                let piece = std::mem::take(&mut self.piece);
                let room = SENT_LIMIT.saturating_sub(self.sent_len) / piece.len().max(1);
                self.send(&piece.repeat(room.min(1 << how.min(12))));
            }
            op::FILL => {
                self.send(&b"x".repeat(FILLERS[how]));
                return;
            }
            op::SETTLE => self.settle(),
            op::RESTART => self.restart(how % 2 == 0),
            _ => {
                self.send(&[what]);
                return;
            }
        }
        self.piece.clear();
    }

    fn advance(&mut self, span: Nanos, in_one_go: bool) {
        // Later moments do not fit into the clock.
        let end = Some(self.engine.now + span)
            .filter(|end| *end < START + Nanos::from_secs(u32::MAX) + Nanos::from_secs(u32::MAX));
        let Some(end) = end else { return };
        let mut steps = 0;
        while let Some(due) = self.engine.server.next_due().filter(|&due| due <= end && !in_one_go)
        {
            self.engine.now = self.engine.now.max(due);
            self.iterate();
            steps += 1;
            if steps == 300 {
                break;
            }
        }
        self.engine.now = end;
        self.iterate();
    }

    /// Takes the output of the client and disconnects it; another may connect in its place.
    fn disconnect(&mut self, index: usize) {
        self.engine.commit();
        self.clients[index].reads = usize::MAX;
        self.flush(index);
        // The number of jobs that a flush deletes is in its reply only.
        while self.is_flushing(index) {
            self.engine.tick();
            self.engine.commit();
            self.flush(index);
        }
        let gone =
            std::mem::replace(&mut self.clients[index], Client::new(self.settings.max_job_size));
        self.clients[index].all_sent = gone.all_sent;
        if let Some(key) = gone.key {
            self.engine.disconnect(key);
        }
        self.check();
    }

    fn restart(&mut self, in_good_order: bool) {
        let Some(disk) = self.disk.clone() else { return };
        (0..CLIENTS).for_each(|index| self.disconnect(index));
        self.engine.commit();
        if in_good_order {
            self.engine.server.close(self.engine.now).unwrap();
        } else {
            let capacity =
                self.ledger.may_lack_space.then(|| u64::from(self.settings.binlog_file_size) * 4);
            self.disk = Some(FakeDisk::with_files(&disk.live_files()));
            self.disk.as_ref().unwrap().set_capacity(capacity);
        }
        self.recover();
    }

    /// Each start takes a new file. If there is no space for it, all jobs are there with more space.
    fn recover(&mut self) {
        let Some(disk) = &self.disk else { return };
        let now = self.engine.now;
        self.engine = Engine::new(self.settings, now);
        let recovered = match self.engine.recover(disk, self.syncing) {
            Err(ReplayError::Begin(_)) if self.ledger.may_lack_space => {
                disk.set_capacity(None);
                self.engine = Engine::new(self.settings, now);
                self.engine.recover(disk, self.syncing)
            }
            recovered => recovered,
        };
        let jobs = recovered.unwrap().jobs;
        assert_eq!(jobs, self.ledger.jobs(), "the number of jobs changes with a restart");
    }

    // ---- Iterations ----

    /// Runs one iteration. Returns whether any connection moved.
    fn iterate(&mut self) -> bool {
        self.engine.tick();
        let mut has_moved = false;
        for index in 0..CLIENTS {
            has_moved |= self.serve(index);
        }
        self.engine.commit();
        for index in 0..CLIENTS {
            has_moved |= self.flush(index);
        }
        self.check();
        has_moved
    }

    fn serve(&mut self, index: usize) -> bool {
        /// What the loop reads when many connections are ready.
        const READ_LEN: usize = 16 * 1024;
        let (engine, client) = (&mut self.engine, &mut self.clients[index]);
        let Some(key) = client.key else { return false };
        let mut has_moved = false;
        if client.talk.is_shut && !std::mem::replace(&mut client.is_shut_passed_on, true) {
            engine.server.half_close(key);
            has_moved = true;
        }
        if engine.server.actions(key).run {
            engine.resume(key);
            client.resumes += 1;
            has_moved = true;
        }
        if engine.server.actions(key).read {
            if !client.sent.is_empty() {
                let rest = client.sent.split_off(client.sent.len().min(READ_LEN));
                let bytes = std::mem::replace(&mut client.sent, rest);
                client.talk.ask(&bytes, &mut self.ledger);
                client.given += bytes.len();
                engine.receive(key, &bytes);
                has_moved = true;
            } else if client.talk.is_shut && !std::mem::replace(&mut client.is_end_passed_on, true)
            {
                engine.server.end_input(key);
                has_moved = true;
            }
        }
        has_moved
    }

    /// The client reads, and is disconnected once the server wants to close.
    fn flush(&mut self, index: usize) -> bool {
        let client = &mut self.clients[index];
        let Some(key) = client.key else { return false };
        // A slow client gets faster, so that the run ends.
        let hurry = if client.reads > 0 { self.received_len / 256 } else { 0 };
        // The event loop would serve the connections that are named here.
        self.engine.server.take_dirty(&mut Vec::new());
        let received = self.engine.take_output(key, client.reads.max(hurry));
        self.received_len += received.len();
        client.talk.receive(&received, &mut self.ledger);
        let is_over = self.engine.server.actions(key).close;
        if is_over {
            assert!(client.talk.is_answered(), "closed with {:?}", client.talk);
            let all_sent = std::mem::take(&mut client.all_sent);
            *client = Client { all_sent, ..Client::new(self.settings.max_job_size) };
            self.engine.disconnect(key);
        }
        is_over || !received.is_empty()
    }

    fn settle(&mut self) {
        let limit = ITERATIONS_PER_BYTE * self.sent_len + 1000;
        let mut silent_iterations = 0;
        loop {
            let received_len = self.received_len;
            let has_moved = self.iterate();
            if self.is_enough() || !has_moved && !(0..CLIENTS).any(|index| self.is_flushing(index))
            {
                return;
            }
            silent_iterations =
                if self.received_len > received_len { 0 } else { silent_iterations + 1 };
            assert!(silent_iterations < limit, "connections move without end and without output");
        }
    }

    /// Returns whether the server is freeing the jobs of a flush of the client.
    fn is_flushing(&self, index: usize) -> bool {
        let client = &self.clients[index];
        let actions = client.key.map(|key| self.engine.server.actions(key));
        let is_blocked = actions.is_some_and(|it| !it.run && !it.read && !it.write && !it.close);
        is_blocked && client.talk.is_flushing()
    }

    // ---- The judge ----

    /// Checks what must hold after every step.
    fn check(&mut self) {
        self.engine.server.check();
        let names_len = 204 * (self.ledger.names + 2);
        let longest_reply = names_len.max(self.settings.max_job_size as usize + 60).max(3000);
        let longest_reply = longest_reply.max(if self.ledger.has_batches { BATCH_LEN } else { 0 });
        for client in &self.clients {
            let Some(key) = client.key else { continue };
            let mut slices = [IoSlice::new(&[]); 300];
            let outlet = self.engine.server.output_handle(key);
            let filled = outlet.next_slices(&mut slices);
            let len: usize = slices[..filled].iter().map(|slice| slice.len()).sum();
            assert!(len < OUTPUT_LIMIT + longest_reply, "{len} bytes of output of one client");
            let limit = ITERATIONS_PER_BYTE * client.given + 100;
            assert!(client.resumes < limit, "the connection is resumed without end");
        }
    }

    /// All clients read to the end, have all replies, and disconnect.
    fn end(&mut self) {
        self.clients.iter_mut().for_each(|client| client.reads = usize::MAX);
        self.settle();
        if self.is_enough() {
            return;
        }
        for client in &self.clients {
            let Some(key) = client.key else { continue };
            let actions = self.engine.server.actions(key);
            assert!(!actions.run && !actions.write && !actions.close, "{actions:?}");
            assert_eq!(actions.read, client.talk.is_answered(), "{:?}", client.talk);
            assert!(actions.read || client.talk.may_wait(), "{:?}", client.talk);
        }
        self.clients.iter_mut().for_each(|client| client.talk.is_shut = true);
        self.settle();
        if self.is_enough() {
            return;
        }
        assert!(self.clients.iter().all(|client| client.key.is_none()), "all connections end");
        let mut iterations = 0;
        while self.engine.server.next_due().is_some_and(|due| due <= self.engine.now) {
            self.iterate();
            iterations += 1;
            assert!(iterations < 10_000, "work is due in the same moment again and again");
        }
        self.check_sums();
    }

    fn check_sums(&mut self) {
        let key = self.engine.connect();
        let stats = self.engine.ask(key, "stats\r\n");
        let current = |what: &str| number(&stats, &format!("current-{what}"));
        let states = ["ready", "delayed", "buried"];
        let jobs: u64 = states.iter().map(|state| current(&format!("jobs-{state}"))).sum();
        assert_eq!(jobs, self.ledger.jobs(), "the sum of jobs is wrong");
        assert_eq!(current("connections"), 1);
        for key in ["jobs-reserved", "waiting", "producers", "workers"] {
            assert_eq!(current(key), 0, "{key} are left");
        }
        let tubes = self.engine.ask(key, "list-tubes\r\n");
        let tubes: Vec<&str> = tubes.lines().filter_map(|line| line.strip_prefix("- ")).collect();
        assert_eq!(current("tubes"), tubes.len() as u64);
        for tube in tubes.iter().take(20) {
            let text = self.engine.ask(key, format!("stats-tube {tube}\r\n"));
            let jobs: u64 =
                states.iter().map(|state| number(&text, &format!("current-jobs-{state}"))).sum();
            assert!(jobs > 0 || *tube == "default", "{tube} is there without a job");
        }
    }
}

// ---- In one piece and in many ----

fn compare_pieces(bytes: &[u8], mode: u8) {
    let max_job_size = MAX_JOB_SIZES[usize::from(mode & 3)];
    let Some(at_once) = replies(bytes, max_job_size, usize::MAX, 1) else { return };
    let piece_len = [1, 2, 3, 7, 50, 225, 1000, 5000][usize::from(mode >> 5)];
    let piece_len = piece_len.max(bytes.len() / 2000);
    let in_pieces = replies(bytes, max_job_size, piece_len, 1000);
    let is_same = in_pieces.as_ref() == Some(&at_once);
    assert!(is_same, "other replies in pieces of {piece_len}: {}", bytes.escape_ascii());
}

/// Returns the replies to one client alone, or `None` if they are very long. The client shuts its
/// sending side down at the end, or when it would wait, and reads in steps of `piece_len`.
fn replies(bytes: &[u8], max_job_size: u32, piece_len: usize, share: usize) -> Option<Vec<u8>> {
    let settings = Settings { max_job_size, binlog_file_size: 0, ..Settings::DEFAULT };
    let mut engine = Engine::new(settings, START);
    engine.server.share_budget(share);
    let key = engine.connect();
    let (mut rest, mut received) = (bytes, Vec::new());
    let (mut is_shut, mut iterations) = (false, 0);
    while !engine.server.actions(key).close {
        let actions = engine.server.actions(key);
        if actions.run {
            engine.resume(key);
        } else if actions.read && rest.is_empty() {
            engine.server.end_input(key);
        } else if actions.read {
            let piece;
            (piece, rest) = rest.split_at(rest.len().min(piece_len));
            engine.receive(key, piece);
        } else if engine.server.next_due().is_some_and(|due| due <= engine.now) {
            // The jobs of a flush are freed.
            engine.tick();
        } else if !actions.write && !std::mem::replace(&mut is_shut, true) {
            engine.server.half_close(key);
        }
        received.extend(engine.take_output(key, piece_len.max(received.len() / 16)));
        if received.len() > RECEIVED_LIMIT / 4 {
            return None;
        }
        iterations += 1;
        assert!(
            iterations < ITERATIONS_PER_BYTE * bytes.len() + 100_000,
            "the connection moves without end"
        );
    }
    Some(received)
}
