//! Servers over one fake of etcd, and what must hold at every moment.
//!
//! Each server has a runtime of its own with virtual time, as a process has its own clock: it can be
//! stopped and go on later. This file alone names the parts of the server above the seam.

use crate::fake::{Fake, Fault, Kind, NODES, World};
use beanstalkd::testing::etcd::{
    Duty, EtcdDisk, EtcdOptions, Keys, Member, Nodes, Request, Shared, Standing, serve,
};
use beanstalkd::testing::{Disk, FileNumber, Nanos};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, MutexGuard};
use std::task::Poll;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{advance, sleep};

pub type Files = BTreeMap<FileNumber, Vec<u8>>;

const HEAD: &[u8] = b"v7";
pub const QUOTA: u64 = 32 << 20;
/// A task that was woken wakes at most some others within one step of time.
const POLLS: usize = 16;
/// Requests have a timeout of at most 10 s.
const LONGEST_READING_MS: u64 = 60_000;

thread_local! {
    /// The clock of the server that runs.
    static CLOCK_NS: Cell<u64> = const { Cell::new(0) };
}

/// Servers and their history.
pub struct Cluster {
    pub fake: Fake,
    pub now_ms: u64,
    pub ttl_secs: u32,
    pub servers: Vec<Option<Server>>,
    /// Why servers have ended, in the order of time: server, reason.
    pub ends: Vec<(usize, String)>,
    /// Leaders and their changes, the last one last.
    terms: Vec<Term>,
    started: usize,
    /// etcd ends leases early: for a moment no server can know.
    pub has_early_ends: bool,
    /// A change may wait for this long.
    pub longest_wait_ms: u64,
}

pub struct Server {
    runtime: Runtime,
    /// The thread for etcd; `None` after its end.
    serving: Option<Pin<Box<dyn Future<Output = ()>>>>,
    shared: Arc<Shared>,
    requests: UnboundedSender<Request>,
    end: Option<oneshot::Sender<Sender<()>>>,
    disk: EtcdDisk,
    /// How many syncs were begun and have ended.
    begun: u64,
    ended: u64,
    name: String,
    phase: Phase,
    pub is_stopped: bool,
    clock_ns: u64,
    /// The time that its timers have seen.
    timers_ns: u64,
    /// The speed of its clock in percent.
    pub speed: u64,
    /// The time for which the present step waits.
    pub waiting_ms: u64,
}

#[derive(Debug)]
enum Phase {
    StandingBy,
    Reading(JoinHandle<io::Result<Files>>),
    /// The term with this index.
    Serving(usize),
    /// The same after SIGTERM.
    Ending(usize),
    /// All replies are sent, and the lease is being given back.
    Leaving,
    /// It does not lead, and only reads.
    Dumping(JoinHandle<io::Result<Files>>),
}

/// What one leader has found and changed.
struct Term {
    found: Files,
    /// The files after all changes.
    files: Files,
    /// Each change, with the number of its sync.
    changes: Vec<(u64, Change)>,
    acknowledged: usize,
    /// The number of changes that the next leader has found.
    kept: Option<usize>,
    /// Nothing is promised.
    is_forgotten: bool,
}

#[derive(Debug)]
enum Change {
    Append(FileNumber, Vec<u8>),
    Remove(FileNumber),
    SetAside(FileNumber),
    Cut(FileNumber, usize),
}

impl Cluster {
    pub fn new(count: usize, ttl_secs: u32) -> Cluster {
        let mut cluster = Cluster {
            fake: Fake::default(),
            now_ms: 0,
            ttl_secs,
            servers: Vec::new(),
            ends: Vec::new(),
            terms: vec![Term::new(Files::new())],
            started: 0,
            has_early_ends: false,
            longest_wait_ms: u64::from(ttl_secs) * 2_500,
        };
        (0..count).for_each(|server| cluster.start(server));
        cluster
    }

    /// Returns the fake, to change what it does.
    pub fn world(&self) -> MutexGuard<'_, World> {
        self.fake.world()
    }

    pub fn script(&self, server: usize, kind: Kind, faults: impl IntoIterator<Item = Fault>) {
        self.world().script(server, kind, faults);
    }

    /// The same for the first server, behind requests without a fault.
    pub fn script_after(&self, sound: usize, kind: Kind, faults: impl IntoIterator<Item = Fault>) {
        self.script(0, kind, vec![Fault::none(); sound]);
        self.script(0, kind, faults);
    }

    // ---- Processes ----

    pub fn start(&mut self, server: usize) {
        self.servers.resize_with(self.servers.len().max(server + 1), || None);
        self.started += 1;
        let name = format!("server{server}.{}", self.started);
        let started = Server::new(&self.fake, server, name, self.ttl_secs, Duty::Lead);
        assert!(self.servers[server].replace(started).is_none(), "it runs");
    }

    /// Returns what a process reads that only reads the log, as `--dump` does, while the others go on and `act` is
    /// called every 5 ms. It must end within this time.
    pub fn read_beside(
        &mut self,
        within_ms: u64,
        mut act: impl FnMut(&mut Cluster),
    ) -> io::Result<Files> {
        let index = self.servers.len();
        let mut reader =
            Server::new(&self.fake, index, "reader".to_owned(), self.ttl_secs, Duty::Read);
        let files = read(reader.requests.clone());
        reader.phase = Phase::Dumping(reader.runtime.spawn(files));
        self.servers.push(Some(reader));
        let end_ms = self.now_ms + within_ms;
        while self.now_ms < end_ms {
            act(self);
            self.step(5);
            let reader = self.server(index);
            if let Phase::Dumping(reading) = &mut reader.phase
                && reading.is_finished()
            {
                return reader.runtime.block_on(reading).expect("no panic");
            }
        }
        panic!("the reader has no end within {within_ms} ms");
    }

    pub fn kill(&mut self, server: usize) {
        self.servers[server] = None;
    }

    pub fn server(&mut self, server: usize) -> &mut Server {
        self.servers[server].as_mut().expect("it runs")
    }

    /// Stops a process, or its machine, for this time. Timers do not run while a machine is suspended,
    /// but the clock does.
    pub fn stop(&mut self, index: usize, for_ms: u64, is_suspended: bool) {
        self.server(index).is_stopped = true;
        self.run(for_ms);
        let server = self.server(index);
        server.is_stopped = false;
        if is_suspended {
            server.timers_ns = server.clock_ns;
        }
    }

    /// Returns the server that serves clients.
    pub fn leader(&self) -> Option<usize> {
        self.servers.iter().position(|server| {
            server.as_ref().is_some_and(|server| {
                let serves = matches!(server.phase, Phase::Serving(_));
                serves && !server.is_stopped && server.may_answer()
            })
        })
    }

    // ---- Time ----

    /// Lets time pass in steps of 5 ms.
    pub fn run(&mut self, for_ms: u64) {
        let end_ms = self.now_ms + for_ms;
        while self.now_ms < end_ms {
            self.step(5);
        }
    }

    /// Lets time pass until something holds. Returns how long that took.
    pub fn run_until(&mut self, holds: impl Fn(&Cluster) -> bool) -> u64 {
        let begun_ms = self.now_ms;
        while !holds(self) {
            self.step(5);
            let is_late = self.now_ms >= begun_ms + 60_000;
            assert!(!is_late, "it does not come: {:?}, {:?}", self.ends, self.servers);
        }
        self.now_ms - begun_ms
    }

    /// Runs until all changes are acknowledged, and returns how long that took.
    pub fn settle(&mut self) -> u64 {
        self.run_until(Cluster::is_acknowledged)
    }

    pub fn run_until_end(&mut self, server: usize) -> u64 {
        self.run_until(|cluster| cluster.servers[server].is_none())
    }

    pub fn lead(&mut self) -> usize {
        self.run_until(|cluster| cluster.leader().is_some());
        self.leader().expect("it leads")
    }

    pub fn step(&mut self, by_ms: u64) {
        self.now_ms += by_ms;
        self.fake.advance(by_ms);
        for index in 0..self.servers.len() {
            let Some(mut server) = self.servers[index].take() else { continue };
            match self.drive(&mut server, by_ms) {
                Ok(()) if server.serving.is_some() => self.servers[index] = Some(server),
                Ok(()) => self.ends.push((index, "SIGTERM".to_owned())),
                Err(reason) => self.ends.push((index, reason)),
            }
        }
        self.check_answering();
    }

    /// Runs a server for this time. Fails if it has ended.
    fn drive(&mut self, server: &mut Server, by_ms: u64) -> Result<(), String> {
        server.pass(by_ms);
        if server.is_stopped {
            return Ok(());
        }
        server.run();
        let standing = server.shared.standing().map_err(|failure| failure.text)?;
        match &mut server.phase {
            Phase::StandingBy => {
                if standing == Standing::Leader {
                    let files = read(server.requests.clone());
                    server.phase = Phase::Reading(server.runtime.spawn(files));
                    server.waiting_ms = 0;
                }
            }
            Phase::Reading(reading) if reading.is_finished() => {
                let read = server.runtime.block_on(reading).expect("no panic");
                let found = read.map_err(|error| error.to_string())?;
                server.shared.check().map_err(|failure| failure.text)?;
                // It cannot know yet that etcd has ended its lease early, while it has read: the next
                // server may have begun before it.
                let leader = self.fake.world().store.leader();
                if self.has_early_ends && leader.is_none_or(|(name, _)| name != server.name) {
                    return Err("its lease has ended early".to_owned());
                }
                server.phase = Phase::Serving(self.terms.len());
                server.waiting_ms = 0;
                self.begin_term(found);
            }
            Phase::Reading(_) => {
                assert!(server.waiting_ms < LONGEST_READING_MS, "a leader reads without an end");
            }
            Phase::Serving(term) | Phase::Ending(term) => {
                server.shared.check().map_err(|failure| failure.text)?;
                let term = &mut self.terms[*term];
                if server.disk.finished_sync(false).is_some() {
                    server.ended = server.begun;
                }
                let before = term.acknowledged;
                term.acknowledge(server.ended);
                if term.acknowledged > before || term.acknowledged == term.changes.len() {
                    server.waiting_ms = 0;
                }
                let limit = self.longest_wait_ms;
                assert!(server.waiting_ms <= limit, "a change waits for more than {limit} ms");
                if server.ended == server.begun && term.acknowledged < term.changes.len() {
                    server.disk.begin_sync(&[], false, true);
                    server.begun += 1;
                }
                let is_complete = term.acknowledged == term.changes.len();
                if is_complete && matches!(server.phase, Phase::Ending(_)) {
                    server.leave();
                }
            }
            // The process waits this long for etcd, and ends.
            Phase::Leaving if server.waiting_ms > 1_000 => return Err("SIGTERM".to_owned()),
            Phase::Leaving | Phase::Dumping(_) => {}
        }
        Ok(())
    }

    /// Rules 1 and 3: only the server that has the key of the leader may answer.
    fn check_answering(&self) {
        let servers = self.servers.iter().flatten();
        let mut answering = servers.filter(|server| {
            server.shared.standing() == Ok(Standing::Leader)
                && !matches!(server.phase, Phase::Leaving)
                && !server.is_stopped
                && server.may_answer()
        });
        let Some(first) = answering.next().filter(|_| !self.has_early_ends) else { return };
        let second = answering.next().map(|server| &server.name);
        assert_eq!(second, None, "{} may answer too", first.name);
        let leader = self.fake.world().store.leader();
        assert_eq!(
            leader.map(|(name, _)| name).as_ref(),
            Some(&first.name),
            "it may answer without its lease"
        );
    }

    // ---- Changes ----

    /// Appends a record to the newest file of the leader; a new leader begins a new file.
    pub fn put(&mut self, index: usize, record: &[u8]) {
        let newest = self.newest(index);
        if newest == 0 || self.term(index).found.contains_key(&newest) {
            self.put_into_next_file(index, record);
        } else {
            self.change(index, Change::Append(newest, record.to_vec()));
        }
    }

    pub fn put_into_next_file(&mut self, index: usize, record: &[u8]) {
        self.change(index, Change::Append(self.newest(index) + 1, record.to_vec()));
    }

    /// Appends a record, and runs until it is acknowledged.
    pub fn store(&mut self, index: usize, record: &[u8]) {
        self.put(index, record);
        self.settle();
    }

    pub fn store_in_next_file(&mut self, index: usize, record: &[u8]) {
        self.put_into_next_file(index, record);
        self.settle();
    }

    /// Stores some records, each in a chunk of its own.
    pub fn store_each(&mut self, index: usize, count: usize, record: &[u8]) {
        for _ in 0..count {
            self.store(index, record);
        }
    }

    /// Cuts the newest file to this size, or removes it, if it has no record.
    pub fn cut_newest(&mut self, index: usize, size: Option<usize>) {
        let newest = self.newest(index);
        self.change(index, size.map_or(Change::Remove(newest), |size| Change::Cut(newest, size)));
    }

    /// Removes a file, counted from the oldest one, unless it is the newest one.
    pub fn remove(&mut self, index: usize, nth: usize) {
        let file = self.term(index).files.keys().nth(nth).copied();
        if let Some(file) = file.filter(|&file| file != self.newest(index)) {
            self.change(index, Change::Remove(file));
        }
    }

    /// Sets the oldest file aside.
    pub fn set_oldest_aside(&mut self, index: usize) {
        let oldest = self.term(index).files.keys().next().copied().expect("there is a file");
        self.change(index, Change::SetAside(oldest));
    }

    /// The leader makes a change.
    fn change(&mut self, index: usize, change: Change) {
        let server = self.servers[index].as_mut().expect("it runs");
        server.enter();
        let (term, disk) = (&mut self.terms[server.term()], &mut server.disk);
        let made = match &change {
            Change::Append(file, record) => {
                let len = term.files.get(file).map(Vec::len).unwrap_or_else(|| {
                    disk.create(*file, 4096).expect("it is queued");
                    disk.write(*file, 0, HEAD).expect("it is queued");
                    HEAD.len()
                });
                disk.write(*file, len as u64, record)
            }
            Change::Remove(file) => disk.remove(*file),
            Change::SetAside(file) => disk.quarantine(*file).map(drop),
            Change::Cut(file, size) => disk.truncate(*file, *size as u64),
        };
        made.expect("it is queued");
        change.apply(&mut term.files);
        term.changes.push((server.begun + 1, change));
    }

    fn newest(&self, index: usize) -> FileNumber {
        self.term(index).files.last_key_value().map_or(0, |(&file, _)| file)
    }

    fn term(&self, index: usize) -> &Term {
        &self.terms[self.servers[index].as_ref().expect("it runs").term()]
    }

    fn last_term(&self) -> &Term {
        self.terms.last().expect("a first term")
    }

    pub fn is_acknowledged(&self) -> bool {
        self.last_term().acknowledged == self.last_term().changes.len()
    }

    /// Rules 4 to 6: a leader finds what was acknowledged, and perhaps some of the next changes.
    fn begin_term(&mut self, found: Files) {
        let last = self.terms.last_mut().expect("a first term");
        let mut states = last.acknowledged..=last.changes.len();
        last.kept = states.find(|&count| last.after(count) == found);
        assert!(
            last.kept.is_some() || last.is_forgotten,
            "{} of {} changes are acknowledged: {:?}; found {found:?}, before them {:?}",
            last.acknowledged,
            last.changes.len(),
            last.changes,
            last.found,
        );
        self.terms.push(Term::new(found));
    }

    pub fn terms(&self) -> usize {
        self.terms.len() - 1
    }

    /// Returns whether these are the files after some of the changes of the last leader.
    pub fn were(&self, files: &Files) -> bool {
        let term = self.last_term();
        (0..=term.changes.len()).any(|count| term.after(count) == *files)
    }

    /// Forgets the history: etcd was restored to an older state.
    pub fn forget(&mut self) {
        self.terms.last_mut().expect("a first term").is_forgotten = true;
    }

    /// Returns the files that the last leader has found.
    pub fn found(&self) -> &Files {
        &self.last_term().found
    }
}

impl Server {
    fn new(fake: &Fake, index: usize, name: String, ttl_secs: u32, duty: Duty) -> Server {
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
        let addresses = NODES.map(str::to_owned).to_vec();
        let timeout = Duration::from_secs(ttl_secs.into()) / 5;
        let shared = Arc::new(Shared::new(|| Nanos::from_nanos(CLOCK_NS.get()), QUOTA));
        let etcd = EtcdOptions {
            url: "etcd://0,1,2/jobs".to_owned(),
            nodes: addresses.clone(),
            prefix: "/jobs".to_owned(),
            tls: None,
            file_size: 4096,
            lease_ttl_secs: ttl_secs,
            quota: QUOTA,
        };
        let member = Member {
            nodes: Nodes::over(fake.link(index), addresses, timeout),
            keys: Keys::new(&etcd.prefix),
            etcd,
            duty,
            name: name.clone(),
            shared: Arc::clone(&shared),
            lease_file: None,
        };
        let (requests, received) = unbounded_channel();
        let (end, ended) = oneshot::channel();
        Server {
            runtime: runtime.expect("a runtime"),
            serving: Some(Box::pin(serve(member, received, ended))),
            disk: EtcdDisk::new(Arc::clone(&shared), requests.clone()),
            begun: 0,
            ended: 0,
            shared,
            requests,
            end: Some(end),
            name,
            phase: Phase::StandingBy,
            is_stopped: false,
            clock_ns: 1_000_000_000,
            timers_ns: 1_000_000_000,
            speed: 100,
            waiting_ms: 0,
        }
    }

    /// Gives back the lease, whatever is acknowledged.
    pub fn leave(&mut self) {
        let (done, _) = channel();
        let _ = self.end.take().expect("it has not left").send(done);
        self.phase = Phase::Leaving;
        self.waiting_ms = 0;
    }

    /// Sends SIGTERM: no more commands are taken, and the lease is given back after the last
    /// acknowledgement.
    pub fn end(&mut self) {
        if let Phase::Serving(term) = self.phase {
            self.phase = Phase::Ending(term);
        }
    }

    fn term(&self) -> usize {
        let Phase::Serving(term) = self.phase else { panic!("it does not serve") };
        term
    }

    /// Sets the clock to that of this process.
    fn enter(&self) {
        CLOCK_NS.set(self.clock_ns);
    }

    pub fn may_answer(&self) -> bool {
        self.enter();
        self.shared.check().is_ok()
    }

    pub fn standing(&self) -> Standing {
        self.shared.standing().expect("it has not ended")
    }

    pub fn refuses_puts(&self) -> bool {
        self.disk.refuses_puts()
    }

    pub fn refuses_moves(&self) -> bool {
        self.disk.refuses_moves()
    }

    pub fn note_deletes(&mut self, len: u64) {
        self.disk.note_deletes(len);
    }

    /// Lets time pass on its clock.
    fn pass(&mut self, by_ms: u64) {
        self.clock_ns += by_ms * 1_000_000 * self.speed / 100;
        if !self.is_stopped {
            self.waiting_ms += by_ms;
        }
    }

    /// Runs its tasks until none is ready.
    fn run(&mut self) {
        self.enter();
        let elapsed_ns = self.clock_ns - self.timers_ns;
        self.timers_ns = self.clock_ns;
        let Server { runtime, serving, .. } = self;
        runtime.block_on(async {
            advance(Duration::from_nanos(elapsed_ns)).await;
            for _ in 0..POLLS {
                poll_fn(|context| {
                    if serving
                        .as_mut()
                        .is_some_and(|serving| serving.as_mut().poll(context).is_ready())
                    {
                        *serving = None;
                    }
                    Poll::Ready(())
                })
                .await;
                yield_now().await;
            }
        });
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} {:?}", self.name, self.phase, self.shared)
    }
}

impl Term {
    fn new(found: Files) -> Term {
        let (files, changes) = (found.clone(), Vec::new());
        Term { found, files, changes, acknowledged: 0, kept: None, is_forgotten: false }
    }

    /// Notes that the changes up to this sync were acknowledged to clients.
    fn acknowledge(&mut self, sync: u64) {
        self.acknowledged = self.changes.partition_point(|&(its, _)| its <= sync);
        let is_lost = self.kept.is_some_and(|kept| kept < self.acknowledged);
        assert!(!is_lost, "a change is acknowledged that the next leader has not found");
    }

    fn after(&self, count: usize) -> Files {
        let mut files = self.found.clone();
        self.changes[..count].iter().for_each(|(_, change)| change.apply(&mut files));
        files
    }
}

impl Change {
    fn apply(&self, files: &mut Files) {
        match self {
            Change::Append(file, record) => {
                files.entry(*file).or_insert_with(|| HEAD.to_vec()).extend(record);
            }
            Change::Remove(file) | Change::SetAside(file) => drop(files.remove(file)),
            Change::Cut(file, size) => {
                files.entry(*file).and_modify(|bytes| bytes.truncate(*size));
            }
        }
    }
}

/// Reads all files, as a server does when it starts.
async fn read(requests: UnboundedSender<Request>) -> io::Result<Files> {
    let (to, answer) = channel();
    let _ = requests.send(Request::Read(to));
    let files = wait(answer).await?;
    Ok(files.into_iter().map(|(number, (_, bytes))| (number, bytes)).collect())
}

async fn wait<T>(answer: Receiver<io::Result<T>>) -> io::Result<T> {
    loop {
        match answer.try_recv() {
            Ok(answer) => return answer,
            Err(TryRecvError::Empty) => sleep(Duration::from_millis(1)).await,
            Err(TryRecvError::Disconnected) => return Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}
