//! A whole server with a few clients that say anything, in any pieces, and read as they please.
//!
//! The first byte chooses how the server is run. The rest is what the clients send, as it is; a
//! byte that no command needs ([`ESCAPE`]) announces something else, which the byte behind it
//! tells: another client, another piece, time, a hang-up ... So a conversation is a seed almost as it
//! stands, and mutations of its bytes stay conversations.
//!
//! `talk.rs` judges what each client is told, `Host` the rest. Then one client's bytes are sent once
//! more, alone, in one piece and in many: the replies must be the same.

use super::talk::{Ledger, Talk};
use super::{Bytes, START, ask, number, read_log, server, take_output};
use crate::fake_disk::FakeDisk;
use beanstalkd::testing::ConnKey;
use beanstalkd::testing::Nanos;
use beanstalkd::testing::ReplayError;
use beanstalkd::testing::Syncing;
use beanstalkd::testing::{Server, Settings};
use std::io::IoSlice;

/// Announces one of the [`op`]s; twice stands for itself.
pub const ESCAPE: u8 = 0xff;

/// What the high half of the byte behind an [`ESCAPE`] means. The low half says how much or whom.
pub mod op {
    /// Another client speaks.
    pub const SPEAK: u8 = 0x00;
    /// What was said so far arrives, and the server has its turn.
    pub const TURN: u8 = 0x10;
    /// Time passes: see `SPANS`.
    pub const ADVANCE: u8 = 0x20;
    /// The client shuts down its sending side.
    pub const SHUT: u8 = 0x30;
    /// The connection is gone.
    pub const HANG_UP: u8 = 0x40;
    /// From now on the client reads so much in a turn: see `READS`.
    pub const READ: u8 = 0x50;
    /// The server drains.
    pub const DRAIN: u8 = 0x60;
    /// The turn is shared among so many: see `SHARES`.
    pub const SHARE: u8 = 0x70;
    /// The piece is said again and again, up to 4096 times.
    pub const REPEAT: u8 = 0x80;
    /// So many bytes are said: see `FILLERS`.
    pub const FILL: u8 = 0x90;
    /// The server goes on until nothing moves.
    pub const SETTLE: u8 = 0xa0;
    /// With a binlog: the server ends, in good order or not, and starts again.
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

/// What a connection keeps for a client that does not read, beside one reply.
const OUTPUT_LIMIT: usize = 256 * 1024;
/// No more is said by all clients together, and to them.
const SAID_LIMIT: usize = 200_000;
const TOLD_LIMIT: usize = 6 << 20;
/// A kick or a hang-up of all jobs takes no more turns than this.
const TURNS_PER_BYTE: usize = 16;

/// Any clients at all.
pub fn run(bytes: &[u8]) {
    read_log();
    let mut bytes = Bytes(bytes);
    let mode = bytes.byte();
    let mut host = Host::new(mode);
    let mut story = bytes.0;
    while !story.is_empty() && !host.is_enough() {
        let end = story.iter().position(|&byte| byte == ESCAPE).unwrap_or(story.len());
        host.say(&story[..end]);
        story = &story[end..];
        if let [ESCAPE, what, rest @ ..] = story {
            host.perform(*what);
            story = rest;
        } else {
            break;
        }
    }
    let first = std::mem::take(&mut host.clients[0].all_said);
    if !host.is_enough() {
        host.end();
    }
    if first.len() <= 60_000 {
        compare_pieces(&first, mode);
    }
}

/// What the event loop does for the server, and the network for the clients.
struct Host {
    server: Server,
    settings: Settings,
    disk: Option<FakeDisk>,
    syncing: Syncing,
    now: Nanos,
    clients: Vec<Client>,
    /// Who speaks.
    speaker: usize,
    /// What is said again by [`op::REPEAT`].
    piece: Vec<u8>,
    ledger: Ledger,
    said_len: usize,
    told_len: usize,
}

struct Client {
    /// None while it is not connected.
    key: Option<ConnKey>,
    talk: Talk,
    /// On its way to the server.
    sent: Vec<u8>,
    all_said: Vec<u8>,
    is_shut_told: bool,
    is_end_told: bool,
    reads: usize,
    /// How many bytes the server was given, and how often it was told to go on.
    given: usize,
    resumes: usize,
}

impl Client {
    fn new(max_job_size: u32) -> Client {
        Client {
            key: None,
            talk: Talk::new(max_job_size),
            sent: Vec::new(),
            all_said: Vec::new(),
            is_shut_told: false,
            is_end_told: false,
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
            server: server(settings, START),
            settings,
            disk,
            syncing,
            now: START,
            clients,
            speaker: 0,
            piece: Vec::new(),
            ledger,
            said_len: 0,
            told_len: 0,
        };
        host.recover();
        host
    }

    fn is_enough(&self) -> bool {
        self.said_len > SAID_LIMIT || self.told_len > TOLD_LIMIT
    }

    // ---- What clients and others do ----

    fn say(&mut self, bytes: &[u8]) {
        self.said_len += bytes.len();
        self.piece.extend_from_slice(bytes);
        let server = &mut self.server;
        let client = &mut self.clients[self.speaker];
        client.key.get_or_insert_with(|| server.connect().unwrap());
        if !client.talk.is_shut {
            client.sent.extend_from_slice(bytes);
            client.all_said.extend_from_slice(bytes);
        }
    }

    fn perform(&mut self, what: u8) {
        let how = usize::from(what & 0x0f);
        match what & 0xf0 {
            op::SPEAK => self.speaker = how % CLIENTS,
            op::TURN => {
                self.turn();
            }
            op::ADVANCE => self.advance(SPANS[how % SPANS.len()], how >= SPANS.len()),
            op::SHUT => self.clients[self.speaker].talk.is_shut = true,
            op::HANG_UP => self.close_after_write(self.speaker),
            op::READ => self.clients[self.speaker].reads = READS[how % READS.len()],
            op::DRAIN if how == 0 => self.server.set_draining(true),
            op::SHARE => self.server.share_budget(SHARES[how % SHARES.len()]),
            op::REPEAT => {
                let piece = std::mem::take(&mut self.piece);
                let room = SAID_LIMIT.saturating_sub(self.said_len) / piece.len().max(1);
                self.say(&piece.repeat(room.min(1 << how.min(12))));
            }
            op::FILL => {
                self.say(&b"x".repeat(FILLERS[how]));
                return;
            }
            op::SETTLE => self.settle(),
            op::RESTART => self.restart(how % 2 == 0),
            _ => {
                self.say(&[what]);
                return;
            }
        }
        self.piece.clear();
    }

    fn advance(&mut self, span: Nanos, in_one_go: bool) {
        // No clock goes on for so many centuries.
        let end = Some(self.now + span)
            .filter(|end| *end < START + Nanos::from_secs(u32::MAX) + Nanos::from_secs(u32::MAX));
        let Some(end) = end else { return };
        let mut steps = 0;
        while let Some(due) = self.server.next_due().filter(|&due| due <= end && !in_one_go) {
            self.now = self.now.max(due);
            self.turn();
            steps += 1;
            if steps == 300 {
                break;
            }
        }
        self.now = end;
        self.turn();
    }

    /// The client takes what is there and goes; another may come in its place.
    fn close_after_write(&mut self, index: usize) {
        self.commit();
        self.clients[index].reads = usize::MAX;
        self.flush(index);
        let gone =
            std::mem::replace(&mut self.clients[index], Client::new(self.settings.max_job_size));
        self.clients[index].all_said = gone.all_said;
        if let Some(key) = gone.key {
            self.server.disconnect(key, self.now);
        }
        self.look();
    }

    fn restart(&mut self, in_good_order: bool) {
        let Some(disk) = self.disk.clone() else { return };
        (0..CLIENTS).for_each(|index| self.close_after_write(index));
        self.commit();
        if in_good_order {
            self.server.close(self.now).unwrap();
        } else {
            let capacity =
                self.ledger.may_lack_space.then(|| u64::from(self.settings.binlog_file_size) * 4);
            self.disk = Some(FakeDisk::with_files(&disk.live_files()));
            self.disk.as_ref().unwrap().set_capacity(capacity);
        }
        self.recover();
    }

    /// Each start takes a new file. Should there be no space for one, all jobs are there when there is.
    fn recover(&mut self) {
        let Some(disk) = &self.disk else { return };
        self.server = server(self.settings, self.now);
        let recovered = match self.server.recover(disk.boxed(), self.syncing, self.now) {
            Err(ReplayError::Begin(_)) if self.ledger.may_lack_space => {
                disk.set_capacity(None);
                self.server = server(self.settings, self.now);
                self.server.recover(disk.boxed(), self.syncing, self.now)
            }
            recovered => recovered,
        };
        let jobs = recovered.unwrap().jobs;
        assert_eq!(jobs, self.ledger.jobs(), "all jobs are there again");
    }

    // ---- The turns of the loop ----

    /// One turn. Says whether anything moved.
    fn turn(&mut self) -> bool {
        self.server.tick(self.now);
        let mut has_moved = false;
        for index in 0..CLIENTS {
            has_moved |= self.serve(index);
        }
        self.commit();
        for index in 0..CLIENTS {
            has_moved |= self.flush(index);
        }
        self.look();
        has_moved
    }

    fn commit(&mut self) {
        self.server.commit(self.now).unwrap();
    }

    fn serve(&mut self, index: usize) -> bool {
        /// As the loop does when many are ready.
        const READ_LEN: usize = 16 * 1024;
        let (server, client) = (&mut self.server, &mut self.clients[index]);
        let Some(key) = client.key else { return false };
        let mut has_moved = false;
        if client.talk.is_shut && !std::mem::replace(&mut client.is_shut_told, true) {
            server.half_close(key);
            has_moved = true;
        }
        if server.actions(key).run {
            server.resume(key, self.now);
            client.resumes += 1;
            has_moved = true;
        }
        if server.actions(key).read {
            if !client.sent.is_empty() {
                let rest = client.sent.split_off(client.sent.len().min(READ_LEN));
                let bytes = std::mem::replace(&mut client.sent, rest);
                client.talk.ask(&bytes, &mut self.ledger);
                client.given += bytes.len();
                server.receive(key, &bytes, self.now);
                has_moved = true;
            } else if client.talk.is_shut && !std::mem::replace(&mut client.is_end_told, true) {
                server.end_input(key);
                has_moved = true;
            }
        }
        has_moved
    }

    /// The client reads, and is let go when it is over.
    fn flush(&mut self, index: usize) -> bool {
        let client = &mut self.clients[index];
        let Some(key) = client.key else { return false };
        // Who is slow need not take for ever.
        let hurry = if client.reads > 0 { self.told_len / 256 } else { 0 };
        let told = take_output(&mut self.server, key, client.reads.max(hurry));
        self.told_len += told.len();
        client.talk.hear(&told, &mut self.ledger);
        let is_over = self.server.actions(key).close;
        if is_over {
            assert!(client.talk.is_answered(), "closed with {:?}", client.talk);
            let all_said = std::mem::take(&mut client.all_said);
            *client = Client { all_said, ..Client::new(self.settings.max_job_size) };
            self.server.disconnect(key, self.now);
        }
        is_over || !told.is_empty()
    }

    fn settle(&mut self) {
        let limit = TURNS_PER_BYTE * self.said_len + 1000;
        let mut silent_turns = 0;
        loop {
            let told_len = self.told_len;
            if !self.turn() || self.is_enough() {
                return;
            }
            silent_turns = if self.told_len > told_len { 0 } else { silent_turns + 1 };
            assert!(silent_turns < limit, "something moves for ever, and nobody is told anything");
        }
    }

    // ---- The judge ----

    /// What must hold after every step.
    fn look(&mut self) {
        self.server.check();
        let names_len = 204 * (self.ledger.names + 2);
        let longest_reply = names_len.max(self.settings.max_job_size as usize + 60).max(3000);
        for client in &self.clients {
            let Some(key) = client.key else { continue };
            let mut slices = [IoSlice::new(&[]); 300];
            let output_handle = self.server.output_handle(key);
            let filled = output_handle.next_slices(&mut slices);
            let len: usize = slices[..filled].iter().map(|slice| slice.len()).sum();
            assert!(len < OUTPUT_LIMIT + longest_reply, "{len} bytes are kept for a client");
            let limit = TURNS_PER_BYTE * client.given + 100;
            assert!(client.resumes < limit, "it is always to go on, and never comes to an end");
        }
    }

    /// Everybody reads to the end, is found to be answered, and goes.
    fn end(&mut self) {
        self.clients.iter_mut().for_each(|client| client.reads = usize::MAX);
        self.settle();
        if self.is_enough() {
            return;
        }
        for client in &self.clients {
            let Some(key) = client.key else { continue };
            let actions = self.server.actions(key);
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
        let mut turns = 0;
        while self.server.next_due().is_some_and(|due| due <= self.now) {
            self.turn();
            turns += 1;
            assert!(turns < 10_000, "there is always something to do at once");
        }
        self.check_sums();
    }

    fn check_sums(&mut self) {
        let key = self.server.connect().unwrap();
        let stats = ask(&mut self.server, key, "stats\r\n", self.now);
        let current = |what: &str| number(&stats, &format!("current-{what}"));
        let states = ["ready", "delayed", "buried"];
        let jobs: u64 = states.iter().map(|state| current(&format!("jobs-{state}"))).sum();
        assert_eq!(jobs, self.ledger.jobs(), "all jobs are somewhere");
        assert_eq!(current("connections"), 1);
        for nobody in ["jobs-reserved", "waiting", "producers", "workers"] {
            assert_eq!(current(nobody), 0, "{nobody} are left");
        }
        let tubes = ask(&mut self.server, key, "list-tubes\r\n", self.now);
        let tubes: Vec<&str> = tubes.lines().filter_map(|line| line.strip_prefix("- ")).collect();
        assert_eq!(current("tubes"), tubes.len() as u64);
        for tube in tubes.iter().take(20) {
            let text = ask(&mut self.server, key, &format!("stats-tube {tube}\r\n"), self.now);
            let jobs: u64 =
                states.iter().map(|state| number(&text, &format!("current-jobs-{state}"))).sum();
            assert!(jobs > 0 || *tube == "default", "{tube} is there for nobody");
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
    assert!(is_same, "in pieces of {piece_len} it is another story: {}", bytes.escape_ascii());
}

/// What one client alone is told. It shuts down its sending side at the end, or when it would wait,
/// and reads no more in a turn than it sends, as long as that is not too slow. Nothing when that is
/// very much.
fn replies(bytes: &[u8], max_job_size: u32, piece_len: usize, share: usize) -> Option<Vec<u8>> {
    let mut server =
        server(Settings { max_job_size, binlog_file_size: 0, ..Settings::DEFAULT }, START);
    server.share_budget(share);
    let key = server.connect().unwrap();
    let (mut rest, mut told) = (bytes, Vec::new());
    let (mut is_shut, mut turns) = (false, 0);
    while !server.actions(key).close {
        let actions = server.actions(key);
        if actions.run {
            server.resume(key, START);
        } else if actions.read && rest.is_empty() {
            server.end_input(key);
        } else if actions.read {
            let piece;
            (piece, rest) = rest.split_at(rest.len().min(piece_len));
            server.receive(key, piece, START);
        } else if !actions.write && !std::mem::replace(&mut is_shut, true) {
            server.half_close(key);
        }
        told.extend(take_output(&mut server, key, piece_len.max(told.len() / 16)));
        if told.len() > TOLD_LIMIT / 4 {
            return None;
        }
        turns += 1;
        assert!(turns < TURNS_PER_BYTE * bytes.len() + 100_000, "something moves for ever");
    }
    Some(told)
}
