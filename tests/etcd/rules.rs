//! One test for each rule and fault. The rules are numbered as in the description of the cluster:
//! 1 leader, 2 fencing, 3 the lease by the own clock, 4 chunks, 5 acknowledgements in order, 6 removal,
//! 8 the end of a server, 10 space, 12 names and passwords.

use crate::fake::{Fault, Kind, World, failure};
use crate::servers::{Cluster, QUOTA};
use crate::store::{LEADER, Store};
use beanstalkd::testing::etcd::Standing;
use beanstalkd::testing::etcd::api::NOT_FOUND;
use beanstalkd::testing::etcd::client::{PutOptions, Txn, TxnOp};
use beanstalkd::testing::refuse_after;
use std::ops::RangeInclusive;

const TTL_SECS: u32 = 5;
/// Four fifths of the TTL, and the longest step.
const SAFE_MS: u64 = 4_000;
const LATE_MS: u64 = 700;

/// Returns a server that leads and has stored a record.
fn single() -> Cluster {
    let mut cluster = Cluster::new(1, TTL_SECS);
    assert_eq!(cluster.lead(), 0);
    cluster.store(0, b"first");
    cluster
}

/// Returns the same with a standby server.
fn pair() -> Cluster {
    let mut cluster = single();
    cluster.start(1);
    // The lease was renewed at least once.
    cluster.run(1_500);
    cluster
}

/// The only server is killed and leads again.
fn restart(cluster: &mut Cluster) {
    cluster.kill(0);
    cluster.start(0);
    cluster.lead();
}

/// Runs until the other server leads, and returns how long that took. It has found what it must.
fn fail_over(cluster: &mut Cluster) -> u64 {
    let took_ms = cluster.run_until(|cluster| cluster.leader() == Some(1));
    cluster.store(1, b"next");
    took_ms
}

/// Kills the only server, changes what is stored, and starts the server, which ends because this key is missing,
/// and serves nothing.
fn start_without(cluster: &mut Cluster, key: &str, change: impl FnOnce(&mut Store)) {
    change_while_none_runs(cluster, |world| change(&mut world.store));
    cluster.start(0);
    cluster.run(10_000);
    assert_eq!(cluster.leader(), None, "it serves without {key}: {:?}", cluster.found());
    let (_, reason) = &cluster.ends[0];
    assert!(reason.starts_with(&format!("{key} is missing or damaged; ")), "{reason}");
}

fn change_while_none_runs(cluster: &mut Cluster, change: impl FnOnce(&mut World)) {
    cluster.kill(0);
    cluster.forget();
    change(&mut cluster.world());
}

/// Every fault of a request that changes something.
fn faults() -> Vec<(&'static str, Vec<Fault>)> {
    vec![
        ("doubled at once", vec![Fault::doubled(1)]),
        ("doubled late", vec![Fault::doubled(LATE_MS)]),
        ("request late", vec![Fault::late(LATE_MS, 1)]),
        ("answer late", vec![Fault::late(1, LATE_MS)]),
        ("request lost", vec![Fault::lost_request()]),
        ("answer lost", vec![Fault::lost_answer()]),
        ("outcome unknown, not made", vec![Fault::unknown(&[]), Fault::none()]),
        ("outcome unknown, made", vec![Fault::unknown(&[1]), Fault::none()]),
        ("outcome unknown, made after the retry", vec![Fault::unknown(&[LATE_MS]), Fault::none()]),
        (
            "outcome unknown, made before and after",
            vec![Fault::unknown(&[1, LATE_MS]), Fault::none()],
        ),
        ("made after a lost answer", vec![Fault::unknown(&[LATE_MS]), Fault::lost_answer()]),
        ("made beside a late retry", vec![Fault::unknown(&[300]), Fault::late(200, LATE_MS)]),
    ]
}

// ---- Rule 1 ----

#[test]
fn rule_1_a_server_recognises_its_own_key_after_an_unknown_outcome() {
    for (name, faults) in faults() {
        let mut cluster = Cluster::new(1, TTL_SECS);
        cluster.script(0, Kind::Claim, faults);
        let took_ms = cluster.run_until(|cluster| cluster.leader() == Some(0));
        assert!(took_ms < 2_500, "{name}: {took_ms} ms");
        assert_eq!(cluster.world().count(Kind::Grant), 1, "{name}");
        cluster.run(u64::from(TTL_SECS) * 2_000);
        assert_eq!(cluster.ends, [], "{name}");
    }
}

#[test]
fn rule_1_a_standby_tries_although_its_watch_has_missed_the_end() {
    for fault in
        [Fault::lost_request(), Fault::lost_answer(), Fault::refused(failure(14, "no leader"))]
    {
        let mut cluster = Cluster::new(1, TTL_SECS);
        cluster.lead();
        cluster.script(1, Kind::Watch, vec![fault; 3]);
        cluster.start(1);
        cluster.run(100);
        cluster.kill(0);
        cluster.run_until(|cluster| cluster.leader() == Some(1));
    }
}

#[test]
fn rule_1_a_server_that_is_killed_is_followed_after_its_lease() {
    // Its machine had a node too, or not.
    for node in [None, Some(0), Some(1), Some(2)] {
        let mut cluster = pair();
        // Some records in a closed file, and some in the newest one.
        cluster.store_in_next_file(0, b"next");
        cluster.run(1_000);
        cluster.world().cut.extend(node.map(|node| (1, node)));
        cluster.kill(0);
        let took_ms = fail_over(&mut cluster);
        assert!((3_900..5_300).contains(&took_ms), "node {node:?}: {took_ms} ms");
    }
}

/// Another program writes keys.
fn write(world: &mut World, puts: Vec<TxnOp>) {
    let written = world.store.txn(&Txn::new().and_then(puts).into());
    written.expect("there is space");
}

/// Another program writes the key of the leader, with a lease. Returns the lease.
fn lead_as_another_program(cluster: &Cluster, name: &str) -> i64 {
    let mut world = cluster.world();
    let lease = world.store.grant(60, 0).expect("there is space").id();
    let options = PutOptions::new().with_lease(lease);
    write(&mut world, vec![TxnOp::put(LEADER, name, Some(options))]);
    lease
}

#[test]
fn rule_1_no_server_waits_for_the_end_of_a_leader_without_a_lease() {
    let mut cluster = Cluster::new(1, TTL_SECS);
    write(&mut cluster.world(), vec![TxnOp::put(LEADER, "an operator", None)]);
    cluster.run(100);
    assert_eq!(cluster.ends[0].1, "/jobs/leader has no lease: no server wrote it; delete it");
}

#[test]
fn rule_1_the_name_of_a_leader_is_one_line_of_visible_text() {
    let mut cluster = Cluster::new(1, TTL_SECS);
    lead_as_another_program(&cluster, "\"b\\\n2026 ERROR forged\u{1b}[31m");
    cluster.run(100);
    let name = "\"b\\\u{fffd}2026 ERROR forged\u{fffd}[31m".to_owned();
    assert_eq!(cluster.server(0).standing(), Standing::Standby(name));
}

// ---- Rules 2 and 3 ----

/// What ends a leader, whether it ends the lease early in etcd, and within which ms the leader ends.
type End = (&'static str, fn(&mut World), bool, RangeInclusive<u64>);

#[test]
fn rules_2_and_3_a_leader_ends_in_time_and_another_one_follows() {
    let ends: [End; 7] = [
        ("its lease ends early", World::end_leader, true, 0..=50),
        ("its key is deleted", |world| world.store.remove(LEADER), true, 0..=50),
        ("it is cut off", |world| world.cut_off(0), false, SAFE_MS - 1_050..=SAFE_MS),
        ("a renewal finds no lease", refuse_renewal, false, 0..=1_050),
        ("only an old node renews", |world| leave_old_node(world, 0), false, 0..=SAFE_MS),
        ("only another old node", |world| leave_old_node(world, 1), false, 0..=SAFE_MS),
        ("only the last old node", |world| leave_old_node(world, 2), false, 0..=SAFE_MS),
    ];
    for (name, end, is_early, limits_ms) in ends {
        let mut cluster = pair();
        cluster.has_early_ends = is_early;
        cluster.put(0, b"in flight");
        end(&mut cluster.world());
        let took_ms = cluster.run_until_end(0);
        assert!(limits_ms.contains(&took_ms), "{name}: {took_ms} ms");
        fail_over(&mut cluster);
    }
}

fn refuse_renewal(world: &mut World) {
    let ended = failure(NOT_FOUND, "requested lease not found");
    world.script(0, Kind::KeepAlive, [Fault::refused(ended)]);
}

/// A server reaches only this node, which does not know the present leader of etcd.
fn leave_old_node(world: &mut World, node: usize) {
    world.elect_without(node);
    world.cut.extend((0..3).filter(|&other| other != node).map(|other| (0, other)));
}

#[test]
fn rule_2_a_leader_ends_with_the_next_renewal_if_its_watch_is_blind() {
    for is_followed in [false, true] {
        let mut cluster = Cluster::new(1, TTL_SECS);
        cluster.script(0, Kind::Watch, vec![Fault::lost_request(); 100]);
        cluster.lead();
        cluster.run(3_000);
        cluster.has_early_ends = true;
        cluster.world().store.remove(LEADER);
        if is_followed {
            lead_as_another_program(&cluster, "another");
        }
        let took_ms = cluster.run_until_end(0);
        assert!(took_ms <= 1_100, "{took_ms} ms");
    }
}

#[test]
fn rule_2_a_server_whose_lease_ends_before_it_serves_does_not_lead() {
    // It does not notice the end for some time, and what it writes first is late.
    for after_ms in (0..200).step_by(10) {
        let mut cluster = Cluster::new(1, TTL_SECS);
        cluster.has_early_ends = true;
        cluster.script(0, Kind::KeepAlive, [Fault::late(900, 1)]);
        cluster.script(0, Kind::Watch, [Fault::lost_request()]);
        cluster.script(0, Kind::Write, [Fault::late(200, 1)]);
        cluster.run_until(|cluster| cluster.world().store.leader().is_some());
        cluster.run(after_ms);
        cluster.world().end_leader();
        cluster.start(1);
        cluster.run_until(|cluster| cluster.leader() == Some(1));
        let terms = cluster.terms();
        cluster.run(5_000);
        assert_eq!(cluster.terms(), terms, "{after_ms} ms: the first server serves later");
    }
}

#[test]
fn rule_2_a_late_write_of_a_stopped_server_is_not_applied() {
    for late_ms in [1, 2_000, 6_000, 9_000] {
        let mut cluster = pair();
        cluster.script(0, Kind::Write, [Fault::late(late_ms, 1)]);
        cluster.put(0, b"late");
        cluster.run(10);
        cluster.server(0).is_stopped = true;
        fail_over(&mut cluster);
        cluster.put(1, b"more");
        cluster.run(5_000);
        cluster.server(0).is_stopped = false;
        cluster.run(10);
        assert!(cluster.servers[0].is_none(), "it may not answer after it was stopped");
        cluster.kill(1);
        cluster.start(0);
        cluster.lead();
    }
}

#[test]
fn rule_3_the_lease_counts_from_when_a_renewal_was_sent() {
    let mut cluster = Cluster::new(1, TTL_SECS);
    let late = Fault::late(1, 900);
    cluster.script(0, Kind::KeepAlive, vec![late; 100]);
    cluster.lead();
    cluster.run(10_000);
    let sent = |cluster: &Cluster| cluster.world().count(Kind::KeepAlive);
    let before = sent(&cluster);
    cluster.run_until(|cluster| sent(cluster) > before);
    cluster.run(950);
    cluster.world().cut_off(0);
    let took_ms = 950 + cluster.run_until_end(0);
    assert!((SAFE_MS - 20..=SAFE_MS).contains(&took_ms), "{took_ms} ms");
}

/// A renewal is lost. The next one is answered, without effect, by a node without which the others have elected a
/// leader. Then this node learns of that, and answers a read.
#[test]
fn rule_3_a_renewal_by_an_old_node_counts_from_a_read_before() {
    for known_ms in (1_000..3_000).step_by(20) {
        let mut cluster = pair();
        cluster.script(0, Kind::KeepAlive, [Fault::lost_request()]);
        cluster.script(0, Kind::KeepAlive, vec![Fault::late(1, 40); 10]);
        cluster.world().elect_without(1);
        cluster.run(known_ms);
        cluster.world().old_node = None;
        cluster.run(60);
        cluster.world().cut_off(0);
        cluster.run_until_end(0);
        fail_over(&mut cluster);
    }
}

#[test]
fn rule_3_the_ttl_that_was_granted_counts() {
    for (granted_secs, safe_ms) in [(1, 800), (3, 2_400), (20, 16_000)] {
        let mut cluster = Cluster::new(1, TTL_SECS);
        cluster.world().store.granted_ttl_secs = Some(granted_secs);
        cluster.lead();
        cluster.world().cut_off(0);
        let took_ms = cluster.run_until_end(0);
        assert!((safe_ms / 2..=safe_ms).contains(&took_ms), "{granted_secs} s: {took_ms} ms");
    }
}

#[test]
fn rule_3_a_granted_ttl_of_0_does_not_lead() {
    let mut cluster = Cluster::new(1, TTL_SECS);
    cluster.world().store.granted_ttl_secs = Some(0);
    cluster.run(10_000);
    assert_eq!(cluster.leader(), None);
    let grants = cluster.world().count(Kind::Grant);
    assert!(grants <= 110, "{grants} leases in 10 s");
    cluster.world().store.granted_ttl_secs = None;
    cluster.lead();
}

#[test]
fn rule_3_a_stopped_process_or_suspended_machine_never_answers_again() {
    for is_suspended in [false, true] {
        let mut cluster = pair();
        cluster.put(0, b"in flight");
        cluster.stop(0, 6_000, is_suspended);
        assert!(!cluster.server(0).may_answer());
        cluster.run(5);
        assert!(cluster.servers[0].is_none());
        fail_over(&mut cluster);
    }
}

#[test]
fn rule_3_a_short_stop_is_harmless() {
    let mut cluster = pair();
    cluster.stop(0, 2_500, false);
    cluster.store(0, b"after it");
    cluster.run(20_000);
    assert_eq!(cluster.ends, []);
}

#[test]
fn rule_3_one_node_that_is_old_or_gone_is_no_end() {
    for node in 0..3 {
        for is_old in [false, true] {
            let mut cluster = pair();
            if is_old {
                cluster.world().elect_without(node);
            } else {
                cluster.world().cut.extend([(0, node), (1, node)]);
            }
            for _ in 0..20 {
                cluster.put(0, b"record");
                cluster.run(1_500);
            }
            cluster.settle();
            assert_eq!(cluster.ends, [], "node {node}");
        }
    }
}

/// It was started with a wrong list of members, as a cluster of its own. The others are gone for a moment.
#[test]
fn rule_1_a_node_of_another_cluster_is_refused() {
    for node in 0..3 {
        let mut cluster = pair();
        cluster.world().leave_cluster(node);
        let others = (0..3).filter(|&other| other != node);
        let cut = (0..2).flat_map(|server| others.clone().map(move |other| (server, other)));
        cluster.world().cut.extend(cut);
        cluster.run(2_500);
        cluster.world().cut.clear();
        cluster.run(10_000);
        let (_, store) = cluster.world().stranger.clone().expect("it was set");
        assert!(store.leader().is_none(), "node {node} has another leader");
        cluster.settle();
        cluster.store(0, b"with the others");
        assert_eq!(cluster.ends, []);
    }
}

#[test]
fn rule_1_a_server_that_starts_refuses_a_node_that_is_a_cluster_of_its_own() {
    let mut cluster = single();
    // It asks this node first.
    cluster.world().leave_cluster(0);
    cluster.start(1);
    cluster.run(5_000);
    assert!(matches!(cluster.server(1).standing(), Standing::Standby(_)));
    assert_eq!((cluster.leader(), &cluster.ends[..]), (Some(0), &[][..]));
}

// ---- Rules 4 to 6 ----

#[test]
fn rule_4_each_chunk_is_there_once_whatever_happens_to_its_transaction() {
    for (name, faults) in faults() {
        let mut cluster = pair();
        cluster.script(0, Kind::Write, faults);
        for record in [&b"one"[..], b"two", b"three"] {
            cluster.store(0, record);
        }
        // What is late comes now.
        cluster.run(1_000);
        cluster.kill(0);
        fail_over(&mut cluster);
        assert_eq!(cluster.found()[&1], b"v7firstonetwothree", "{name}");
        assert_eq!(cluster.ends, [], "{name}");
    }
}

#[test]
fn rule_5_a_chunk_waits_for_the_one_before_it() {
    let mut cluster = pair();
    cluster.script(0, Kind::Write, [Fault::lost_request()]);
    cluster.put(0, b"one");
    cluster.run(20);
    let sent = cluster.world().count(Kind::Write);
    cluster.put(0, b"two");
    cluster.run(500);
    assert_eq!(cluster.world().count(Kind::Write), sent, "one is in flight");
    assert!(!cluster.is_acknowledged());
    cluster.settle();
}

#[test]
fn rule_6_a_removed_file_does_not_come_back() {
    for (name, faults) in faults() {
        for skipped in 0..3 {
            let mut cluster = pair();
            cluster.script_after(skipped, Kind::Write, faults.clone());
            cluster.put(0, b"last");
            cluster.put_into_next_file(0, b"moved");
            cluster.remove(0, 0);
            cluster.settle();
            cluster.put(0, b"more");
            cluster.run(2_000);
            assert_eq!(cluster.ends, [], "{name}");
            cluster.kill(0);
            fail_over(&mut cluster);
            assert_eq!(cluster.found().keys().collect::<Vec<_>>(), [&2], "{name}");
            assert_eq!(cluster.world().store.chunks(), 3, "{name}: chunks of the file are left");
        }
    }
}

#[test]
fn rule_6_a_damaged_file_is_set_aside_although_its_chunks_are_too_large_now() {
    let mut cluster = single();
    cluster.store(0, &[b'x'; 250_000]);
    cluster.store_in_next_file(0, b"next");
    cluster.world().store.longest_request = 100_000;
    cluster.set_oldest_aside(0);
    cluster.settle();
    assert_eq!(cluster.ends, []);
    let copied = |chunk: u64| {
        let key = format!("/jobs/damaged/00000001/{chunk:016x}");
        cluster.world().store.get(&key).map_or(0, |pair| pair.value.len())
    };
    assert!((1..=6).map(copied).sum::<usize>() > 250_000);
}

#[test]
fn rule_6_a_damaged_file_is_set_aside_by_few_requests() {
    let mut cluster = single();
    cluster.store_each(0, 199, b"small");
    cluster.store_in_next_file(0, b"next");
    let sent = cluster.world().count(Kind::Write);
    cluster.set_oldest_aside(0);
    let took_ms = cluster.settle();
    assert!(took_ms < 200, "replies have waited for {took_ms} ms");
    let sent = cluster.world().count(Kind::Write) - sent;
    assert!(sent < 10, "{sent} transactions for a file of 200 chunks");
    for chunk in [1, 2, 64, 65, 200] {
        let key = format!("/jobs/damaged/00000001/{chunk:016x}");
        assert!(cluster.world().store.get(&key).is_some(), "{key} is missing");
    }
    restart(&mut cluster);
    assert_eq!(cluster.found().keys().collect::<Vec<_>>(), [&2]);
}

// ---- Rules 7 to 12 ----

#[test]
fn rule_7_no_command_waits_for_a_read_that_is_lost() {
    for reads in 0..20 {
        let mut cluster = single();
        cluster.kill(0);
        // Its key is gone.
        cluster.run(6_000);
        cluster.script_after(reads, Kind::Read, [Fault::lost_answer()]);
        cluster.start(0);
        cluster.lead();
        cluster.put(0, b"next");
        let took_ms = cluster.settle();
        assert!(took_ms <= 1_200, "{took_ms} ms if read {reads} is lost");
    }
}

#[test]
fn rule_7_no_reply_waits_long_for_a_chunk_that_is_read_back() {
    for reads in 0..3 {
        let mut cluster = single();
        cluster.script(0, Kind::Write, [Fault::unknown(&[1])]);
        cluster.script_after(reads, Kind::Read, [Fault::lost_answer()]);
        cluster.put(0, b"next");
        let took_ms = cluster.settle();
        assert!(took_ms <= 1_000 * u64::from(TTL_SECS), "{took_ms} ms if read {reads} is lost");
    }
}

#[test]
fn rule_8_the_next_server_leads_at_once_after_a_clean_end() {
    let mut cluster = pair();
    cluster.put(0, b"last");
    cluster.server(0).end();
    let took_ms = fail_over(&mut cluster);
    assert!(took_ms < 200, "{took_ms} ms");
    assert_eq!(cluster.found()[&1], b"v7firstlast");
}

#[test]
fn rule_8_a_server_that_ends_gives_back_its_lease_although_a_node_is_gone() {
    for node in 0..3 {
        let mut cluster = pair();
        cluster.world().cut.extend([(0, node), (1, node)]);
        cluster.run(5_000);
        cluster.server(0).end();
        let took_ms = fail_over(&mut cluster);
        assert!(took_ms < 1_500, "without node {node}: {took_ms} ms");
    }
}

#[test]
fn rule_8_a_server_that_ends_gives_back_its_lease_although_a_change_waits_for_space() {
    let mut cluster = pair();
    cluster.world().store.has_no_space = true;
    cluster.put(0, b"not stored");
    cluster.run(2_000);
    cluster.server(0).leave();
    cluster.run(1_000);
    cluster.world().store.has_no_space = false;
    let took_ms = fail_over(&mut cluster);
    assert!(took_ms < 500, "{took_ms} ms");
}

#[test]
fn rule_10_without_space_puts_are_refused_and_the_lease_is_kept() {
    let mut cluster = pair();
    cluster.longest_wait_ms = 30_000;
    cluster.world().store.has_no_space = true;
    cluster.put(0, b"full");
    cluster.run(20_000);
    assert!(cluster.server(0).refuses_puts());
    assert!(!cluster.is_acknowledged());
    cluster.world().store.has_no_space = false;
    cluster.settle();
    assert!(!cluster.server(0).refuses_puts());
    assert_eq!(cluster.ends, []);
}

#[test]
fn rule_10_without_space_no_server_leads_and_none_is_named_as_the_leader() {
    let mut cluster = pair();
    cluster.world().store.has_no_space = true;
    cluster.kill(0);
    cluster.run(10_000);
    assert_eq!(cluster.server(1).standing(), Standing::Undecided);
    cluster.world().store.has_no_space = false;
    fail_over(&mut cluster);
}

#[test]
fn rule_10_puts_are_refused_before_the_next_look_finds_that_etcd_is_full() {
    let mut cluster = pair();
    // Three eighths of the quota are left for puts.
    cluster.world().sizes = [[QUOTA / 2, QUOTA / 2]; 3];
    cluster.run(2_100);
    let quarter = vec![b'x'; usize::try_from(QUOTA / 4).unwrap()];
    cluster.put(0, &quarter);
    assert!(!cluster.server(0).refuses_puts());
    cluster.put(0, &quarter);
    assert!(cluster.server(0).refuses_puts(), "whatever is stored of it");
    cluster.settle();
    // It has become smaller, perhaps by a compaction.
    cluster.run(2_100);
    assert!(!cluster.server(0).refuses_puts());
    assert_eq!(cluster.ends, []);
}

#[test]
fn rule_10_what_is_set_aside_counts_before_the_next_look() {
    let mut cluster = single();
    cluster.store(0, &[b'x'; 250_000]);
    cluster.store_in_next_file(0, b"next");
    cluster.world().sizes = [[QUOTA / 2, QUOTA / 8 * 7 - 200_000]; 3];
    cluster.run(2_100);
    assert!(!cluster.server(0).refuses_puts());
    cluster.set_oldest_aside(0);
    cluster.settle();
    assert!(cluster.server(0).refuses_puts());
}

#[test]
fn rule_10_puts_are_refused_before_etcd_is_full() {
    let mut cluster = pair();
    for node in 0..3 {
        for full in [[QUOTA, QUOTA / 2], [QUOTA - (2 << 20), 0], [QUOTA / 8 * 7, QUOTA / 8 * 7]] {
            cluster.world().sizes[node] = full;
            cluster.run(2_100);
            assert!(cluster.server(0).refuses_puts(), "{full:?} at node {node}");
            // A delete is stored.
            cluster.store(0, b"delete");
            cluster.world().sizes[node] = [QUOTA - (3 << 20), QUOTA / 2];
            cluster.run(2_100);
            assert!(!cluster.server(0).refuses_puts());
        }
    }
    assert_eq!(cluster.ends, []);
}

#[test]
fn rule_10_the_last_space_is_for_deletes() {
    let mut cluster = single();
    for (used, deletes, [puts, moves]) in [
        (QUOTA / 8 * 7 - 1000, QUOTA / 16, [false, false]),
        (QUOTA / 8 * 7, 0, [true, false]),
        (QUOTA / 32 * 29, 0, [true, true]),
        (QUOTA / 2, QUOTA / 16 * 7 - 1000, [false, false]),
        (QUOTA / 2, QUOTA / 16 * 7, [true, false]),
        (QUOTA / 2, QUOTA / 2, [true, true]),
    ] {
        cluster.world().sizes = [[used, used]; 3];
        cluster.server(0).note_deletes(deletes);
        cluster.run(2_100);
        let server = cluster.server(0);
        let refused = [server.refuses_puts(), server.refuses_moves()];
        assert_eq!(refused, [puts, moves], "{used} bytes in use, {deletes} of deletes");
    }
}

#[test]
fn rule_10_a_lack_of_space_names_what_helps() {
    let text = failure(8, "mvcc: database space exceeded").text;
    assert!(text.ends_with("then disarm its alarm"), "{text}");
}

#[test]
fn rule_10_old_revisions_that_go_disturb_nobody() {
    let mut cluster = pair();
    for _ in 0..100 {
        cluster.put(0, b"record");
        cluster.run(130);
        cluster.world().store.compact();
    }
    cluster.settle();
    assert_eq!(cluster.ends, []);
    cluster.kill(0);
    fail_over(&mut cluster);
}

#[test]
fn rule_12_a_refused_password_is_named_and_one_node_that_refuses_is_passed_over() {
    let refused = || failure(3, "authentication failed, invalid user ID or password");
    let mut cluster = Cluster::new(1, TTL_SECS);
    cluster.world().refusals.insert(0, refused());
    cluster.lead();
    cluster.run(20_000);
    assert_eq!(cluster.ends, []);
    cluster.world().refusals.extend([(1, refused()), (2, refused())]);
    let took_ms = cluster.run_until_end(0);
    assert!(took_ms <= SAFE_MS, "{took_ms} ms");
    cluster.start(0);
    cluster.run(2_000);
    assert!(cluster.servers[0].is_none(), "another try would fail too");
    assert!(cluster.ends[1].1.contains("authentication failed"), "{:?}", cluster.ends);
    for (index, (code, text, remedy)) in [
        (3, "user name is empty", "set BEANSTALKD_ETCD_USER and"),
        (9, "authentication is not enabled", "unset BEANSTALKD_ETCD_USER and"),
        (
            7,
            "permission denied",
            "the user needs a role that can read and write all keys of the prefix",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        for node in 0..3 {
            cluster.world().refusals.insert(node, failure(code, text));
        }
        cluster.start(0);
        cluster.run_until_end(0);
        let (_, reason) = &cluster.ends[2 + index];
        assert!(reason.contains(text) && reason.contains(remedy), "{reason}");
    }
}

#[test]
fn a_leader_ends_when_etcd_is_restored_to_an_older_state() {
    let mut cluster = Cluster::new(1, TTL_SECS);
    let unused = cluster.world().store.clone();
    cluster.lead();
    cluster.store(0, b"one");
    let with_leader = cluster.world().store.clone();
    for state in [Some(unused), Some(with_leader), None] {
        let is_idle = state.is_none();
        let state = state.unwrap_or_else(|| cluster.world().store.clone());
        cluster.has_early_ends = true;
        cluster.store(0, b"two");
        cluster.run(if is_idle { 2_000 } else { 0 });
        cluster.world().restore(state);
        if !is_idle {
            cluster.put(0, b"three");
        }
        let took_ms = cluster.run_until_end(0);
        let most_ms = if is_idle { 1_100 } else { 2_000 };
        assert!(took_ms <= most_ms, "{took_ms} ms");
        cluster.forget();
        cluster.start(0);
        cluster.lead();
    }
}

#[test]
fn a_leader_changes_nothing_of_what_etcd_was_restored_to() {
    for after_ms in (0..1_600).step_by(50) {
        let mut cluster = single();
        cluster.run(after_ms);
        let snapshot = cluster.world().store.clone();
        cluster.store(0, b"second");
        cluster.world().restore(snapshot);
        cluster.forget();
        cluster.run(3_000);
        restart(&mut cluster);
        assert_eq!(cluster.found()[&1], b"v7first", "{after_ms} ms");
    }
}

#[test]
fn a_leader_that_is_idle_ends_when_others_have_changed_keys_since_etcd_was_restored() {
    let mut cluster = single();
    let mut older = cluster.world().store.clone();
    cluster.store(0, b"lost by the restore");
    cluster.run(2_000);
    for _ in 0..100 {
        older.remove("/other");
    }
    cluster.has_early_ends = true;
    cluster.world().restore(older);
    let took_ms = cluster.run_until_end(0);
    assert!(took_ms <= 1_100, "{took_ms} ms");
    cluster.forget();
    restart(&mut cluster);
}

#[test]
fn a_leader_writes_nothing_for_the_next_one_that_has_its_revision_since_etcd_was_restored() {
    let mut cluster = Cluster::new(1, TTL_SECS);
    cluster.lead();
    cluster.kill(0);
    cluster.run(6_000);
    let older = cluster.world().store.clone();
    let revision = |cluster: &Cluster| cluster.world().store.get(LEADER).expect("one").mod_revision;
    restart(&mut cluster);
    let first = revision(&cluster);
    cluster.has_early_ends = true;
    // It does not notice that its lease has ended, and writes late.
    cluster.world().restore(older);
    cluster.script(0, Kind::KeepAlive, [Fault::late(900, 1)]);
    cluster.script(0, Kind::Write, [Fault::late(LATE_MS, 1)]);
    cluster.put(0, b"of the first");
    cluster.start(1);
    cluster.run_until(|cluster| cluster.leader() == Some(1));
    assert_eq!(revision(&cluster), first);
    cluster.run(1_000);
    cluster.store(1, b"of the next");
    cluster.kill(1);
    cluster.start(1);
    cluster.run_until(|cluster| cluster.leader() == Some(1));
    assert_eq!(cluster.found()[&1], b"v7of the next");
}

// ---- Defects that are known ----

#[test]
fn a_standby_forgets_what_etcd_had_before_it_was_restored() {
    // The next leader creates the second file in the same revision as the one before: other users of
    // etcd have changed keys.
    for changes in 0..12 {
        let mut cluster = pair();
        let mut older = cluster.world().store.clone();
        older.remove(LEADER);
        for _ in 0..changes {
            cluster.world().store.remove("/other");
        }
        cluster.put_into_next_file(0, b"lost by the restore");
        // The standby reads it meanwhile.
        cluster.run(2_000);
        cluster.world().cut_off(1);
        cluster.kill(0);
        cluster.world().restore(older);
        cluster.forget();
        cluster.start(0);
        cluster.lead();
        cluster.store_in_next_file(0, b"kept");
        cluster.world().cut.clear();
        cluster.run(2_000);
        cluster.kill(0);
        cluster.run_until(|cluster| cluster.leader() == Some(1));
    }
}

#[test]
fn a_missing_chunk_is_a_gap() {
    // In the middle of the first file, removed, emptied or overwritten, and the last one of it.
    for (chunk, value) in [(2, None), (2, Some("")), (2, Some("by an operator")), (3, None)] {
        let mut cluster = single();
        for record in [&b"second"[..], b"third"] {
            cluster.store(0, record);
        }
        cluster.store_in_next_file(0, b"fourth");
        let key = format!("/jobs/log/{chunk:016x}");
        let mut chunks = 0;
        start_without(&mut cluster, &key, |store| {
            match value {
                Some(value) => store.overwrite(&key, value),
                None => store.remove(&key),
            }
            chunks = store.chunks();
        });
        assert_eq!(cluster.world().store.chunks(), chunks, "it has changed the others");
    }
}

#[test]
fn the_last_chunk_and_the_newest_file_are_missed_a_second_after_they_were_stored() {
    for keys in [
        &["/jobs/log/0000000000000003"][..],
        &["/jobs/log/0000000000000002", "/jobs/log/0000000000000003", "/jobs/file/00000002"],
        &[
            "/jobs/log/0000000000000000",
            "/jobs/log/0000000000000001",
            "/jobs/log/0000000000000002",
            "/jobs/log/0000000000000003",
            "/jobs/file/00000001",
            "/jobs/file/00000002",
        ],
    ] {
        let mut cluster = single();
        cluster.store_in_next_file(0, b"second");
        cluster.store(0, b"third");
        cluster.run(2_000);
        let missing = "/jobs/log/0000000000000003";
        start_without(&mut cluster, missing, |store| keys.iter().for_each(|key| store.remove(key)));
        let missing = format!("{missing} is missing or damaged; ");
        let read = cluster.read_beside(10_000, |_| {});
        assert!(read.is_err_and(|error| error.to_string().starts_with(&missing)), "{keys:?}");
    }
}

#[test]
fn the_oldest_file_is_missed() {
    // Of files that were never removed, and behind some that were.
    for (removed, oldest) in [(0, 1), (2, 3)] {
        let mut cluster = single();
        for _ in 0..4 {
            cluster.put_into_next_file(0, b"more");
        }
        (0..removed).for_each(|_| cluster.remove(0, 0));
        cluster.settle();
        cluster.run(2_000);
        let keys = [format!("/jobs/file/{oldest:08x}"), format!("/jobs/log/{oldest:016x}")];
        start_without(&mut cluster, &keys[1], |store| {
            keys.iter().for_each(|key| store.remove(key));
        });
    }
}

#[test]
fn chunks_of_removed_files_go_although_an_answer_is_lost() {
    for skipped in 0..5 {
        let mut cluster = single();
        for _ in 0..2 {
            cluster.store_in_next_file(0, b"more");
            cluster.store(0, b"more");
        }
        cluster.run(2_000);
        // One of these deletes chunks, and the next file is removed before that is known.
        cluster.script_after(skipped, Kind::Write, [Fault::lost_answer()]);
        cluster.remove(0, 0);
        cluster.settle();
        cluster.remove(0, 0);
        cluster.settle();
        cluster.run(5_000);
        assert_eq!(
            cluster.world().store.chunks(),
            2,
            "{skipped}: chunks of removed files are left"
        );
        restart(&mut cluster);
    }
}

#[test]
fn a_late_note_of_a_chunk_that_is_gone_since_is_no_loss() {
    let mut cluster = single();
    cluster.run(2_000);
    // The second one notes the lowest chunk, before that goes with its file.
    cluster.script(0, Kind::Write, [Fault::none(), Fault::doubled(LATE_MS)]);
    cluster.store_in_next_file(0, b"second");
    cluster.run(100);
    cluster.remove(0, 0);
    cluster.settle();
    cluster.run(2_000);
    restart(&mut cluster);
}

#[test]
fn a_chunk_in_the_place_of_another_one_is_damage() {
    // Overwritten by its neighbour, and doubled behind the last one.
    for (from, to) in [(2, 3), (3, 2), (1, 4), (2, 4), (3, 4)] {
        let mut cluster = single();
        for record in [&b"second"[..], b"third"] {
            cluster.store(0, record);
        }
        let key = |chunk| format!("/jobs/log/{chunk:016x}");
        start_without(&mut cluster, &key(to), |store| store.copy(&key(from), &key(to)));
    }
}

#[test]
fn a_key_that_is_missing_is_named_before_anything_changes() {
    for files in 1..=3 {
        let of_files = (1..=files).map(|file| format!("/jobs/file/{file:08x}"));
        for key in of_files.chain(["/jobs/format".to_owned()]) {
            let mut cluster = single();
            for _ in 1..files {
                cluster.put_into_next_file(0, b"more");
            }
            cluster.settle();
            start_without(&mut cluster, &key, |store| store.remove(&key));
        }
    }
}

#[test]
fn a_server_that_does_not_fit_is_refused() {
    type Change = fn(&mut World);
    const FORMAT: &str = "beanstalkd-binlog 1 file-size 8192\n";
    let changes: [(Change, &str); 2] = [
        (
            |world| world.store.overwrite("/jobs/format", FORMAT),
            "the files of this binlog have 8192 bytes; start all its servers with -s 8192",
        ),
        (|world| world.is_outdated = true, "etcd 3.3.27 is older than 3.4"),
    ];
    for (change, reason) in changes {
        let mut cluster = single();
        cluster.settle();
        change_while_none_runs(&mut cluster, change);
        cluster.start(0);
        cluster.run(10_000);
        assert_eq!(cluster.ends[0].1, reason);
    }
}

#[test]
fn rule_6_a_file_that_was_removed_from_between_others_does_not_come_back() {
    // A late twin of the transaction that has created the file.
    for late_ms in [100, LATE_MS] {
        let mut cluster = pair();
        cluster.script(0, Kind::Write, [Fault::doubled(late_ms)]);
        for record in [&b"second"[..], b"third"] {
            cluster.store_in_next_file(0, record);
        }
        cluster.remove(0, 1);
        cluster.settle();
        cluster.run(2_000);
        cluster.store(0, b"more");
        cluster.kill(0);
        fail_over(&mut cluster);
        assert_eq!(cluster.found().keys().collect::<Vec<_>>(), [&1, &3]);
        assert_eq!(cluster.found()[&1], b"v7first");
    }
}

#[test]
fn rule_6_the_newest_file_can_be_cut_and_removed() {
    // A large record is in two chunks, and the first leader stores only one of them.
    for (cut, expected) in [(Some(3), [&b"v7x"[..], b"v7next"]), (None, [b"v7next", b""])] {
        let mut cluster = single();
        // The last chunk is noted.
        cluster.run(100);
        cluster.put_into_next_file(0, &[b'x'; 400_000]);
        cluster.script(0, Kind::Write, [Fault::none(), Fault::lost_request()]);
        cluster.run(20);
        cluster.forget();
        restart(&mut cluster);
        assert_eq!(cluster.found()[&2].len(), 2 + 15 * 16 * 1024);
        cluster.cut_newest(0, cut);
        // Nothing was written behind it when the next server leads.
        cluster.settle();
        restart(&mut cluster);
        cluster.store_in_next_file(0, b"next");
        restart(&mut cluster);
        let found = |file| cluster.found().get(&file).map_or(&b""[..], Vec::as_slice);
        assert_eq!([1, 2, 3].map(found), [b"v7first", expected[0], expected[1]]);
    }
}

#[test]
fn rule_4_a_chunk_that_etcd_refuses_as_too_large_is_divided_as_far_as_is_useful() {
    let mut cluster = single();
    cluster.world().store.longest_request = 200_000;
    cluster.store(0, &[b'x'; 250_000]);
    assert_eq!(cluster.ends, []);
    cluster.world().store.longest_request = 4_000;
    cluster.put(0, &[b'x'; 250_000]);
    cluster.run_until_end(0);
    let (_, reason) = &cluster.ends[0];
    assert!(reason.contains("--max-request-bytes"), "{reason}");
}

#[test]
fn rule_4_a_chunk_that_does_not_come_in_time_is_divided() {
    let mut cluster = single();
    cluster.longest_wait_ms = 30_000;
    cluster.world().longest_in_time = Some(40_000);
    cluster.store(0, &[b'x'; 300_000]);
    cluster.world().longest_in_time = None;
    // Short ones that come in time make them longer again.
    let chunks_of = |cluster: &mut Cluster, len| {
        let before = cluster.world().count(Kind::Write);
        cluster.store(0, &vec![b'x'; len]);
        cluster.world().count(Kind::Write) - before
    };
    chunks_of(&mut cluster, 300_000);
    assert!(chunks_of(&mut cluster, 500_000) <= 4, "the chunks stay short");
    assert_eq!(cluster.ends, []);
    restart(&mut cluster);
}

#[test]
fn rule_4_chunks_are_short_while_there_is_no_memory_for_more() {
    let mut cluster = single();
    let mut chunks_of = |has_memory: bool, faults: Vec<Fault>| {
        cluster.script(0, Kind::Write, faults);
        let before = cluster.world().count(Kind::Write);
        refuse_after(if has_memory { usize::MAX } else { 0 });
        cluster.put(0, &[b'x'; 64 * 1024]);
        cluster.run(200);
        refuse_after(usize::MAX);
        cluster.settle();
        assert_eq!(cluster.ends, []);
        cluster.world().count(Kind::Write) - before
    };
    assert_eq!(chunks_of(false, Vec::new()), 16, "chunks of 4 KiB");
    // When memory is back, the same bytes are sent again.
    assert_eq!(chunks_of(false, vec![Fault::lost_answer()]), 8);
    assert_eq!(chunks_of(true, Vec::new()), 1, "the chunks stay short");
    restart(&mut cluster);
}

#[test]
fn rule_4_a_server_without_memory_for_a_page_gives_back_the_lead() {
    let mut cluster = single();
    cluster.kill(0);
    refuse_after(0);
    cluster.start(0);
    cluster.run(10_000);
    refuse_after(usize::MAX);
    let end = cluster.ends.pop().expect("it has ended");
    assert_eq!(end.1, "there is too little memory to read the binlog");
    cluster.start(0);
    let took_ms = cluster.run_until(|cluster| cluster.leader() == Some(0));
    assert!(took_ms < 1_000, "the next server waits for {took_ms} ms");
}

#[test]
fn rule_4_a_page_that_does_not_come_in_time_is_asked_for_in_parts() {
    let mut cluster = single();
    cluster.store_each(0, 130, b"short");
    // 32 chunks come in 10 s, and 64 do not.
    cluster.world().ms_for_each_value = 200;
    restart(&mut cluster);
}

#[test]
fn rule_1_a_server_takes_over_by_pages_whatever_the_length_of_the_newest_file() {
    let mut cluster = pair();
    cluster.store_each(0, 2_000, b"x");
    cluster.kill(0);
    fail_over(&mut cluster);
    let most = cluster.world().store.most_found;
    assert!(most <= 512, "{most} keys in one answer");
}

#[test]
fn rule_11_a_reader_goes_on_while_old_revisions_go() {
    let mut cluster = single();
    for _ in 0..4 {
        cluster.store_in_next_file(0, b"record");
    }
    let files = cluster.read_beside(10_000, |cluster| {
        cluster.put(0, b"more");
        cluster.world().store.compact();
    });
    assert_eq!(files.map(|files| files.len()).ok(), Some(5));
}

#[test]
fn rule_11_a_reader_ends_next_to_a_server_whose_files_live_for_moments() {
    let mut cluster = single();
    let files = cluster.read_beside(1_000, |cluster| {
        cluster.put_into_next_file(0, b"record");
        // The oldest file stays, the others go soon.
        cluster.remove(0, 1);
    });
    let files = files.expect("nothing is damaged");
    assert!(cluster.were(&files), "the files have never been these: {files:?}");
}

#[test]
fn rule_11_a_reader_gives_up_beside_a_server_that_writes_faster_than_it_reads() {
    let mut cluster = single();
    cluster.store_each(0, 100, b"record");
    cluster.world().ms_for_each_value = 30;
    let read = cluster.read_beside(300_000, |cluster| cluster.put(0, b"more"));
    let error = read.expect_err("it has read all").to_string();
    assert_eq!(error, "the server writes faster than this program reads");
}

#[test]
fn rule_11_a_reader_reads_all_although_the_last_chunk_is_not_noted() {
    let mut cluster = single();
    cluster.store_each(0, 5_000, b"x");
    cluster.kill(0);
    cluster.world().store.remove("/jobs/last");
    let files = cluster.read_beside(10_000, |_| {}).expect("nothing is damaged");
    assert!(cluster.were(&files), "the files have never been these");
}

#[test]
fn rule_11_a_server_stands_by_while_a_binlog_is_imported() {
    let mut cluster = Cluster::new(1, TTL_SECS);
    let lease = lead_as_another_program(&cluster, "an import");
    let importing = TxnOp::put("/jobs/format", "beanstalkd-binlog importing\n", None);
    let first = TxnOp::put("/jobs/log/0000000000000000", "", None);
    write(&mut cluster.world(), vec![importing, first]);
    let read = cluster.read_beside(1_000, |_| {});
    let error = read.expect_err("it has read all").to_string();
    assert_eq!(error, "an import imports a binlog");
    cluster.run(1_000);
    assert_eq!(cluster.server(0).standing(), Standing::Standby("an import".to_owned()));
    // It is interrupted.
    cluster.world().store.revoke(lease).expect("it is there");
    cluster.run(1_000);
    assert!(cluster.ends[0].1.starts_with("an import was begun and not completed"));
}

#[test]
fn rule_12_one_node_that_refuses_is_passed_over_while_the_others_are_gone() {
    let mut cluster = Cluster::new(1, TTL_SECS);
    cluster.world().refusals.insert(0, failure(3, "authentication failed"));
    cluster.world().cut.extend([(0, 1), (0, 2)]);
    cluster.run(20_000);
    assert_eq!(cluster.ends, []);
    cluster.world().cut.clear();
    cluster.lead();
}

#[test]
fn rule_12_a_server_that_starts_before_etcd_leads_when_etcd_is_there() {
    let mut cluster = Cluster::new(1, TTL_SECS);
    cluster.world().cut_off(0);
    cluster.run(20_000);
    assert_eq!((cluster.leader(), &cluster.ends[..]), (None, &[][..]));
    cluster.world().cut.clear();
    cluster.lead();
    cluster.store(0, b"first");
}

#[test]
fn rule_12_a_reader_that_reaches_no_node_names_what_helps() {
    let mut cluster = single();
    cluster.world().cut_off(1);
    let read = cluster.read_beside(50_000, |_| {});
    let error = read.expect_err("nothing was read").to_string();
    assert!(error.ends_with("; check that etcd runs there, and the URL of -b"), "{error}");
}
