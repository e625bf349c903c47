//! A fake of etcd: revisions, leases that end in virtual time, watches, and faults of each request.
//!
//! Its time is the true time of a test. It moves only by [`Fake::advance`], which carries out what is
//! due in the order of time. A request is carried out once, twice, late or never, and independently of
//! that answered, refused or left without an answer: see [`Fault`].

use crate::store::Store;
use beanstalkd::testing::etcd::EtcdError;
use beanstalkd::testing::etcd::api::{Answer, Etcd, Node, outcome};
use beanstalkd::testing::etcd::client::proto::{PbResponseHeader, PbStatusResponse, PbTxnRequest};
use beanstalkd::testing::etcd::client::{LeaseGrantResponse, StatusResponse, Txn, TxnResponse};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::oneshot::{self, Sender};
use tokio::time::sleep;

pub const NODES: [&str; 3] = ["0", "1", "2"];

/// A handle on the fake: clones are of the same one.
#[derive(Clone, Default)]
pub struct Fake(Arc<Mutex<World>>);

pub struct Link {
    fake: Fake,
    server: usize,
}

struct Connection {
    fake: Fake,
    server: usize,
    node: usize,
    /// The node was a stranger when the connection was made.
    is_of_stranger: bool,
}

/// The kind of a request, for faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Connect,
    /// A transaction that writes or deletes keys, by other means than the leader's key.
    Write,
    /// A transaction that creates the leader's key.
    Claim,
    Read,
    Status,
    Grant,
    KeepAlive,
    Revoke,
    Watch,
}

#[derive(Clone, Debug)]
pub struct Fault {
    /// The times after which it is carried out, in ms.
    pub applied_ms: Vec<u64>,
    pub reply: Reply,
}

#[derive(Clone, Debug)]
pub enum Reply {
    /// The true answer, this time in ms after the request was carried out first.
    True(u64),
    Never,
    /// This answer, 1 ms after the request.
    Failure(EtcdError),
}

type Event = Box<dyn FnOnce(&mut World) + Send>;

#[derive(Default)]
pub struct World {
    now_ms: u64,
    pub store: Store,
    /// What happens later: time, number, action.
    events: BTreeMap<(u64, u64), Event>,
    event_count: u64,
    watches: Vec<Watch>,
    /// Answers that never come: to drop them would be an answer.
    unanswered: Vec<Box<dyn Send>>,
    /// Faults of the next requests of a server and kind, the first one first.
    script: BTreeMap<(usize, Kind), VecDeque<Fault>>,
    /// Faults of the others are random; `None` means that there are none.
    pub random: Option<fastrand::Rng>,
    /// Servers and nodes between which nothing comes through.
    pub cut: BTreeSet<(usize, usize)>,
    /// A node that does not know that the others have elected a leader without it: it answers
    /// renewals, which have no effect, and what it knows itself, and nothing else.
    pub old_node: Option<usize>,
    /// A node of another cluster, and what that has stored.
    pub stranger: Option<(usize, Store)>,
    /// The answer of each node to everything, such as a refused password.
    pub refusals: BTreeMap<usize, EtcdError>,
    /// The size of each node's database, and how much of it is in use.
    pub sizes: [[u64; 2]; NODES.len()],
    /// Whether its version is one that is not supported any more.
    pub is_outdated: bool,
    /// How long it takes each value that is read to come.
    pub ms_for_each_value: u64,
    /// Transactions with more bytes of values never arrive, if this is set.
    pub longest_in_time: Option<usize>,
    sent: Vec<Kind>,
}

struct Watch {
    server: usize,
    node: usize,
    key: String,
    from: i64,
    sender: Sender<Result<(), EtcdError>>,
}

/// Returns a failure with a code of gRPC, as etcd words it.
pub fn failure(code: i32, text: &str) -> EtcdError {
    EtcdError::of_code(Some(code), format!("etcdserver: {text}"))
}

impl Fault {
    pub fn none() -> Fault {
        Fault::late(1, 1)
    }

    /// The request and its answer are this late.
    pub fn late(request_ms: u64, answer_ms: u64) -> Fault {
        Fault { applied_ms: vec![request_ms], reply: Reply::True(answer_ms) }
    }

    pub fn lost_request() -> Fault {
        Fault { applied_ms: Vec::new(), reply: Reply::Never }
    }

    pub fn lost_answer() -> Fault {
        Fault { applied_ms: vec![1], reply: Reply::Never }
    }

    /// The outcome is unknown to the server. The request is carried out at these times.
    pub fn unknown(applied_ms: &[u64]) -> Fault {
        let timed_out = failure(14, "request timed out");
        Fault { applied_ms: applied_ms.to_vec(), reply: Reply::Failure(timed_out) }
    }

    /// It is carried out again this time later.
    pub fn doubled(again_ms: u64) -> Fault {
        Fault { applied_ms: vec![1, 1 + again_ms], reply: Reply::True(1) }
    }

    pub fn refused(failure: EtcdError) -> Fault {
        Fault { applied_ms: Vec::new(), reply: Reply::Failure(failure) }
    }

    fn random(random: &mut fastrand::Rng, kind: Kind) -> Fault {
        let soon = random.u64(1..20);
        let late = random.u64(1..4_000);
        match random.u32(0..100) {
            0..2 => Fault::lost_request(),
            2..4 => Fault::lost_answer(),
            4..6 => Fault::unknown(&[]),
            6..8 => Fault::unknown(&[soon]),
            8..10 => Fault::unknown(&[late]),
            10..12 => Fault::late(late, soon),
            12..14 => Fault::late(soon, late),
            // The client of etcd sends nothing twice, but a server does that has no answer.
            14..17 if matches!(kind, Kind::Write | Kind::Claim) => Fault::doubled(late),
            _ => Fault::late(soon, random.u64(1..20)),
        }
    }
}

impl Fake {
    pub fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().expect("no other thread")
    }

    /// Returns what one server sees of it.
    pub fn link(&self, server: usize) -> Arc<Link> {
        Arc::new(Link { fake: self.clone(), server })
    }

    pub fn advance(&self, by_ms: u64) {
        let mut world = self.world();
        let end = world.now_ms + by_ms;
        loop {
            let due = world.events.first_key_value().map(|(&(at, _), _)| at);
            world.now_ms = due.filter(|&at| at <= end).unwrap_or(end).max(world.now_ms);
            let now_ms = world.now_ms;
            world.store.end_leases(now_ms);
            if due.is_none_or(|at| at > end) {
                break;
            }
            let (_, event) = world.events.pop_first().expect("one is due");
            event(&mut world);
            world.notify();
        }
        world.notify();
    }
}

impl World {
    pub fn script(&mut self, server: usize, kind: Kind, faults: impl IntoIterator<Item = Fault>) {
        self.script.entry((server, kind)).or_default().extend(faults);
    }

    pub fn cut_off(&mut self, server: usize) {
        self.cut.extend((0..NODES.len()).map(|node| (server, node)));
    }

    pub fn count(&self, kind: Kind) -> usize {
        self.sent.iter().filter(|&&sent| sent == kind).count()
    }

    /// Ends the lease of the leader early, as etcd does at times: its issue 15247.
    pub fn end_leader(&mut self) {
        if let Some((_, lease)) = self.store.leader() {
            self.store.revoke(lease).expect("its key is there");
        }
    }

    /// Lets the other nodes elect a leader, of which this node does not know until [`World::old_node`] is reset.
    pub fn elect_without(&mut self, node: usize) {
        self.old_node = Some(node);
        self.store.renew_leases(self.now_ms);
    }

    /// Puts the state of an earlier moment in the place of the present one, as `etcdctl snapshot
    /// restore` does. Watches end.
    pub fn restore(&mut self, state: Store) {
        self.store.restore(state, self.now_ms);
        self.watches.clear();
    }

    /// Starts a node again, as a cluster of its own.
    pub fn leave_cluster(&mut self, node: usize) {
        self.stranger = Some((node, Store::default()));
        self.watches.retain(|watch| watch.node != node);
    }

    fn is_stranger(&self, node: usize) -> bool {
        self.stranger.as_ref().is_some_and(|(stranger, _)| *stranger == node)
    }

    fn store_of(&mut self, node: usize) -> &mut Store {
        match &mut self.stranger {
            Some((stranger, store)) if *stranger == node => store,
            _ => &mut self.store,
        }
    }

    fn at(&mut self, after_ms: u64, action: impl FnOnce(&mut World) + Send + 'static) {
        self.event_count += 1;
        self.events.insert((self.now_ms + after_ms, self.event_count), Box::new(action));
    }

    fn next_fault(&mut self, server: usize, kind: Kind) -> Fault {
        let scripted = self.script.get_mut(&(server, kind)).and_then(VecDeque::pop_front);
        scripted.unwrap_or_else(|| match &mut self.random {
            Some(random) => Fault::random(random, kind),
            None => Fault::none(),
        })
    }

    /// Answers the watches whose key was deleted.
    fn notify(&mut self) {
        let (cut, old_node) = (self.cut.clone(), self.old_node);
        let store = &self.store;
        let due = self.watches.extract_if(.., |watch| {
            !cut.contains(&(watch.server, watch.node))
                && old_node != Some(watch.node)
                && store.is_deleted_since(&watch.key, watch.from)
        });
        let due: Vec<Watch> = due.collect();
        for watch in due {
            self.at(2, |_| drop(watch.sender.send(Ok(()))));
        }
    }
}

impl Connection {
    /// Sends a request, with the faults that are due.
    fn send<T: Send + 'static>(
        &self,
        kind: Kind,
        action: impl Fn(&mut World) -> Result<T, EtcdError> + Send + Sync + 'static,
    ) -> Answer<T> {
        let (sender, receiver) = oneshot::channel();
        let mut world = self.fake.world();
        world.sent.push(kind);
        let mut fault = world.next_fault(self.server, kind);
        let is_old = world.old_node == Some(self.node);
        let needs_others = !matches!(kind, Kind::Connect | Kind::Status | Kind::KeepAlive);
        if world.cut.contains(&(self.server, self.node)) || is_old && needs_others {
            fault = Fault::lost_request();
        } else if let Some(failure) = world.refusals.get(&self.node)
            && !matches!(kind, Kind::Connect | Kind::Status)
        {
            fault = Fault::refused(failure.clone());
        } else if world.is_stranger(self.node) != self.is_of_stranger {
            fault = Fault::refused(EtcdError::of_code(None, "broken pipe".to_owned()));
        }
        let action = Arc::new(action);
        let mut sender = Some(sender);
        let mut later = fault.applied_ms.into_iter();
        match fault.reply {
            Reply::True(after_ms) => {
                let (action, sender) = (Arc::clone(&action), sender.take());
                let first_ms = later.next().expect("a true answer needs a request");
                world.at(first_ms, move |world| {
                    let answer = action(world);
                    world.at(after_ms, |_| drop(sender.map(|sender| sender.send(answer))));
                });
            }
            Reply::Failure(failure) => {
                let sender = sender.take();
                world.at(1, |_| drop(sender.map(|sender| sender.send(Err(failure)))));
            }
            Reply::Never => {}
        }
        for after_ms in later {
            let action = Arc::clone(&action);
            world.at(after_ms, move |world| drop(action(world)));
        }
        if let Some(sender) = sender {
            world.unanswered.push(Box::new(sender));
        }
        wait(receiver)
    }
}

/// Returns the answer that comes. There is none from a node that has forgotten the request.
fn wait<T: Send + 'static>(receiver: oneshot::Receiver<Result<T, EtcdError>>) -> Answer<T> {
    let gone = || EtcdError::of_code(None, "connection closed".to_owned());
    Box::pin(async move { receiver.await.unwrap_or_else(|_| Err(gone())) })
}

impl Etcd for Link {
    fn connect(&self, address: &str) -> Answer<Arc<dyn Node>> {
        let node = NODES.iter().position(|&node| node == address).expect("a known node");
        let is_of_stranger = self.fake.world().is_stranger(node);
        let (fake, server) = (&self.fake, self.server);
        let connection = || Connection { fake: fake.clone(), server, node, is_of_stranger };
        let connected = connection();
        let answer = connection().send(Kind::Connect, |_| Ok(()));
        Box::pin(async move { answer.await.map(|()| Arc::new(connected) as Arc<dyn Node>) })
    }
}

impl Node for Connection {
    fn txn(&self, txn: Txn) -> Answer<TxnResponse> {
        let txn = PbTxnRequest::from(txn);
        let (kind, node) = (Store::kind(&txn), self.node);
        {
            let mut world = self.fake.world();
            if world.longest_in_time.is_some_and(|longest| Store::value_len(&txn) > longest) {
                world.script(self.server, kind, [Fault::lost_request()]);
            }
        }
        let answer = self.send(kind, move |world| world.store_of(node).txn(&txn));
        let each = Duration::from_millis(self.fake.world().ms_for_each_value);
        Box::pin(async move {
            let answer = answer.await?;
            let values = outcome(&answer).1.flatten().filter(|pair| !pair.value().is_empty());
            sleep(each * u32::try_from(values.count()).expect("few keys")).await;
            Ok(answer)
        })
    }

    fn grant(&self, ttl_secs: u32) -> Answer<LeaseGrantResponse> {
        let node = self.node;
        self.send(Kind::Grant, move |world| {
            let now_ms = world.now_ms;
            world.store_of(node).grant(ttl_secs, now_ms)
        })
    }

    fn keep_alive(&self, lease: i64) -> Answer<()> {
        let node = self.node;
        self.send(Kind::KeepAlive, move |world| {
            if world.old_node == Some(node) {
                Ok(())
            } else {
                let now_ms = world.now_ms;
                world.store_of(node).keep_alive(lease, now_ms)
            }
        })
    }

    fn revoke(&self, lease: i64) -> Answer<()> {
        let node = self.node;
        self.send(Kind::Revoke, move |world| world.store_of(node).revoke(lease))
    }

    fn watch(&self, key: String, from: i64) -> Answer<()> {
        let (server, node) = (self.server, self.node);
        let begun = self.send(Kind::Watch, move |world| {
            world.store_of(node).check_revision(from)?;
            let (sender, receiver) = oneshot::channel();
            world.watches.push(Watch { server, node, key: key.clone(), from, sender });
            Ok(wait(receiver))
        });
        Box::pin(async move { begun.await?.await })
    }

    fn status(&self) -> Answer<StatusResponse> {
        let node = self.node;
        self.send(Kind::Status, move |world| {
            let [db_size, db_size_in_use] = world.sizes[node].map(u64::cast_signed);
            let cluster_id = if world.is_stranger(node) { 2 } else { 1 };
            Ok(StatusResponse(PbStatusResponse {
                header: Some(PbResponseHeader { cluster_id, ..Default::default() }),
                version: if world.is_outdated { "3.3.27" } else { "3.4.30" }.to_owned(),
                db_size,
                db_size_in_use,
                ..Default::default()
            }))
        })
    }
}
