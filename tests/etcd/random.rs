//! Random faults, delays and ends of processes with two servers, from seeds.
//!
//! [`Cluster::step`] checks at every step that at most one server may answer, that what was
//! acknowledged is what the next leader finds, in order and without gaps, and that no read, and after the last
//! fault no change, waits without an end. [`Store::kind`](crate::store::Store::kind) checks that writes are fenced.

use crate::fake::NODES;
use crate::servers::Cluster;
use std::panic::catch_unwind;

const TTL_SECS: u32 = 2;
const STEPS: u32 = 2_500;
const SEEDS: u64 = 20;
/// etcd has no space for at most this long.
const FULL_MS: u64 = 1_500;

#[test]
fn two_servers_survive_random_faults() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    let (first, count) = (number("ETCD_SEED").unwrap_or(0), number("ETCD_SEEDS").unwrap_or(SEEDS));
    let repeated = |seed| panic!("ETCD_SEED={seed} repeats this run");
    let played = |seed| catch_unwind(|| run(seed)).unwrap_or_else(|_| repeated(seed));
    let failovers: u64 = (first..first + count).map(played).sum();
    assert!(failovers > count, "{failovers} changes of the leader are too few");
}

/// Runs one seed, and returns how often the leader has changed.
fn run(seed: u64) -> u64 {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut cluster = Cluster::new(2, TTL_SECS);
    // Chance fails any number of tries in a row, so waits have a bound only without faults.
    let longest_wait_ms = std::mem::replace(&mut cluster.longest_wait_ms, u64::MAX);
    // In some runs etcd ends leases early, and then two servers may answer for a moment.
    cluster.has_early_ends = seed % 4 == 3;
    cluster.world().random = Some(random.fork());
    let mut trouble = Trouble { ends_ms: vec![0; 2], full_until_ms: 0 };
    for _ in 0..STEPS {
        trouble.step(&mut cluster, &mut random);
        cluster.step(random.u64(1..20));
    }
    cluster.longest_wait_ms = longest_wait_ms;
    end_trouble(&mut cluster);
    // Without faults a server leads soon, and everything is acknowledged.
    let leader = cluster.lead();
    cluster.put(leader, b"last");
    cluster.settle();
    cluster.kill(leader);
    cluster.lead();
    cluster.terms() as u64
}

struct Trouble {
    /// When each server goes on that is stopped, or is started that has ended.
    ends_ms: Vec<u64>,
    full_until_ms: u64,
}

impl Trouble {
    fn step(&mut self, cluster: &mut Cluster, random: &mut fastrand::Rng) {
        let now_ms = cluster.now_ms;
        if let Some(leader) = cluster.leader() {
            change(cluster, leader, random);
        }
        for server in 0..2 {
            self.step_server(cluster, server, random);
        }
        let one_in = |random: &mut fastrand::Rng, count: u32| random.u32(0..count) == 0;
        let mut world = cluster.world();
        if one_in(random, 200) {
            world.cut.insert((random.usize(0..2), random.usize(0..NODES.len())));
        }
        if one_in(random, 1_000) {
            world.cut_off(random.usize(0..2));
        }
        if one_in(random, 100) {
            world.cut.clear();
            world.old_node = None;
        }
        if one_in(random, 500) {
            world.elect_without(random.usize(0..NODES.len()));
        }
        if one_in(random, 50) {
            world.store.compact();
        }
        if one_in(random, 800) {
            self.full_until_ms = now_ms + random.u64(0..FULL_MS);
        }
        world.store.has_no_space = now_ms < self.full_until_ms;
        if cluster.has_early_ends && one_in(random, 500) {
            world.end_leader();
        }
    }

    /// Stops, kills, ends and starts a server.
    fn step_server(&mut self, cluster: &mut Cluster, index: usize, random: &mut fastrand::Rng) {
        let now_ms = cluster.now_ms;
        let ttl_ms = u64::from(TTL_SECS) * 1_000;
        let is_over = self.ends_ms[index] <= now_ms;
        match &mut cluster.servers[index] {
            None if is_over => {
                cluster.start(index);
                // Clocks differ less than the fifth of the TTL that is not used.
                cluster.server(index).speed = random.u64(95..=105);
            }
            None => {}
            Some(server) if server.is_stopped => server.is_stopped = !is_over,
            Some(server) => match random.u32(0..2_000) {
                0..3 => {
                    server.is_stopped = true;
                    self.ends_ms[index] = now_ms + random.u64(0..2 * ttl_ms);
                }
                3..5 => {
                    cluster.kill(index);
                    self.ends_ms[index] = now_ms + random.u64(0..ttl_ms);
                }
                5..7 => server.end(),
                _ => {}
            },
        }
    }
}

/// Ends all faults, and starts servers until none ends any more.
fn end_trouble(cluster: &mut Cluster) {
    let mut world = cluster.world();
    world.random = None;
    world.cut.clear();
    world.old_node = None;
    world.store.has_no_space = false;
    drop(world);
    for server in cluster.servers.iter_mut().flatten() {
        (server.is_stopped, server.waiting_ms) = (false, 0);
    }
    // Until requests from before are over, servers may end.
    for _ in 0..1_000 {
        for server in 0..2 {
            if cluster.servers[server].is_none() {
                cluster.start(server);
            }
        }
        cluster.step(5);
    }
}

/// The leader serves commands.
fn change(cluster: &mut Cluster, leader: usize, random: &mut fastrand::Rng) {
    let mut record = vec![b'a' + random.u8(0..26); random.usize(1..20)];
    record.push(b' ');
    match random.u32(0..100) {
        0..20 => cluster.put(leader, &record),
        20..22 => cluster.put_into_next_file(leader, &record),
        22..25 => cluster.remove(leader, random.usize(0..3)),
        _ => {}
    }
}
