//! What becomes of a node in each state at each sighting and outcome, and that no number of them breaks a bound.

use super::*;
use crate::errors::{BRIEF_BYTES_MAX, without_middle};

const INTERVAL: Duration = Duration::from_secs(60);
const RETRY_MAX: Duration = Duration::from_secs(30 * 60);
const DISCOVERY: Sighting<'static> = Sighting::Discovery;
const LATE_ANSWER: Sighting<'static> = Sighting::LateAnswer;
const OPERATOR: Sighting<'static> = Sighting::Operator;
/// The event that every row begins with, and another one.
const COPY: Sighting<'static> = Sighting::Event { id: "first" };
const EVENT: Sighting<'static> = Sighting::Event { id: "second" };

#[test]
fn a_sighting_does_what_the_state_table_says() {
    check_sighting(absent, DISCOVERY, "queued: Queued");
    check_sighting(absent, EVENT, "queued: Queued");
    check_sighting(absent, LATE_ANSWER, "queued: Queued");
    check_sighting(absent, OPERATOR, "queued: Queued");

    check_sighting(queued, DISCOVERY, "known: Queued");
    check_sighting(queued, EVENT, "ask again: Queued");
    check_sighting(queued, COPY, "known: Queued");
    check_sighting(queued, LATE_ANSWER, "known: Queued");
    check_sighting(queued, OPERATOR, "known: Queued");

    check_sighting(working, DISCOVERY, "known: Working");
    check_sighting(working, EVENT, "known: Working");
    check_sighting(working, OPERATOR, "known: Working");

    check_sighting(configured, DISCOVERY, "known: Settling");
    check_sighting(configured, LATE_ANSWER, "known: Settling");
    check_sighting(configured, OPERATOR, "known: Settling");
    check_sighting(configured, COPY, "known: Settling");
    check_sighting(configured_just_now, EVENT, "known: Settling");
    check_sighting(configured, EVENT, "queued: Queued");
    check_sighting(configured_unanswered, EVENT, "queued: Queued");
    check_sighting(configured_again, EVENT, "not due: Waiting 60");
    check_sighting(configured_long_ago, DISCOVERY, "queued: Queued");

    check_sighting(upgraded, DISCOVERY, "known: Settling");
    check_sighting(upgraded, COPY, "known: Settling");
    check_sighting(upgraded, EVENT, "queued: Queued");

    check_sighting(shut_down, DISCOVERY, "known: Settling");
    check_sighting(shut_down_just_now, EVENT, "known: Settling");
    check_sighting(shut_down, EVENT, "queued: Queued");

    check_sighting(failed_once, DISCOVERY, "queued: Queued");
    check_sighting(busy, DISCOVERY, "not due: Waiting 120");
    check_sighting(busy, EVENT, "queued: Queued");
    check_sighting(busy, COPY, "not due: Waiting 120");
    check_sighting(busy, OPERATOR, "queued: Queued");
    check_sighting(busy_long_ago, DISCOVERY, "queued: Queued");
    check_sighting(failed_thrice, DISCOVERY, "not due: Waiting 60");
    check_sighting(failed_thrice, LATE_ANSWER, "not due: Waiting 60");
    check_sighting(failed_thrice, EVENT, "not due: Waiting 60");
    check_sighting(failed_thrice, OPERATOR, "queued: Queued");
    check_sighting(failed_thrice_long_ago, DISCOVERY, "queued: Queued");
    check_sighting(failed_thrice_long_ago, EVENT, "queued: Queued");
    check_sighting(returned_twice, EVENT, "not due: Waiting 60");
}

#[test]
fn a_full_queue_leaves_no_newcomer_behind_and_no_known_node_worse() {
    check_refused(absent, DISCOVERY, "queue full: absent");
    check_refused(absent, EVENT, "queue full: absent");
    check_refused(configured, EVENT, "queue full: Waiting 0");
    check_refused(upgraded, EVENT, "queue full: Waiting 0");
    check_refused(failed_once, DISCOVERY, "queue full: Waiting 0");
    check_refused(busy, EVENT, "queue full: Waiting 0");
    check_refused(failed_thrice, OPERATOR, "queue full: Waiting 0");
    check_refused(busy, DISCOVERY, "not due: Waiting 120");
}

#[test]
fn losing_leadership_forgets_all_but_running_nodes() {
    for (state, expected) in [
        (absent as fn(&mut World), "absent"),
        (queued, "absent"),
        (working, "Working"),
        (configured, "absent"),
        (upgraded, "absent"),
        (failed_once, "absent"),
        (failed_thrice, "absent"),
    ] {
        let mut world = World::new();
        state(&mut world);
        world.registry.clear();
        assert_eq!(world.state(), expected);
        world.check();
    }
}

#[test]
fn an_outcome_leads_where_the_outcome_table_says() {
    let ok = |at| Outcome::Provisioned { configured_at: at, restarted_at: Some(at) };
    let unanswered = |at| Outcome::Provisioned { configured_at: at, restarted_at: None };
    check_outcome(ok, "provisioned", "provisioned", "Settling 60");
    check_outcome(unanswered, "provisioned", "provisioned", "Settling 60");
    check_outcome(upgrade_sent, "provisioned", "upgrade_sent", "Settling 600");
    check_outcome(|_| stuck(), "error", "upgrade_stuck", "Waiting 1800");
    check_outcome(|_| Outcome::ShutDown, "provisioned", "shutdown", "Settling 60");
    check_outcome(|_| Outcome::Deferred, "", "deferred", "Waiting 0");
    check_outcome(|_| Outcome::Busy, "", "busy", "Waiting 120");
    check_outcome(|_| Outcome::HelperFailed, "error", "helper_failed", "Waiting 60");
    check_outcome(|_| Outcome::WrongToken, "error", "wrong_token", "Waiting 60");
    check_outcome(|_| Outcome::Misconfigured, "error", "misconfigured", "Waiting 60");
    check_outcome(|_| Outcome::Unreachable, "error", "unreachable", "Waiting 0");
    check_outcome(|_| Outcome::Refused, "error", "refused", "Waiting 0");
    check_outcome(|_| Outcome::Failed, "error", "failed", "Waiting 0");
    check_outcome(|_| Outcome::NotProvisioning, "", "not_provisioning", "absent");
    check_outcome(|_| Outcome::Stopped(Closed::Deadline), "", "", "Queued");
    check_outcome(|_| Outcome::Stopped(Closed::TermEnded), "", "", "absent");
    check_outcome(|_| Outcome::Stopped(Closed::Aborted), "", "", "absent");
}

#[test]
fn nothing_is_kept_for_later_when_the_gate_is_lost() {
    for outcome in [Outcome::Failed, Outcome::Deferred, Outcome::ShutDown] {
        let mut world = World::new();
        working(&mut world);
        world.gate_lost = true;
        let finished = world.finish(outcome.clone());
        assert_eq!(finished, Finished { tally: Tally::of(&outcome), next: Next::Absent });
        assert_eq!(world.state(), "absent");
    }
}

#[test]
fn whoever_was_only_named_by_an_operator_is_forgotten_when_nobody_answers() {
    for is_excused in [false, true] {
        let mut world = World::new();
        world.sight(OPERATOR);
        world.just_reconnected = is_excused;
        assert_eq!(world.finish(Outcome::Unreachable).next, Next::Absent);
        assert_eq!(world.state(), "absent");
        world.check();
    }
    // Nor does it wait for room.
    let mut world = World::new();
    world.sight(OPERATOR);
    world.capacity = 0;
    world.finish(Outcome::Stopped(Closed::Deadline));
    assert_eq!(world.state(), "absent");
    // Who was heard is waited for, whenever that was.
    for (first, then) in [
        (OPERATOR, DISCOVERY),
        (OPERATOR, EVENT),
        (OPERATOR, LATE_ANSWER),
        (DISCOVERY, OPERATOR),
        (EVENT, OPERATOR),
    ] {
        let mut world = World::new();
        world.sight(first);
        world.sight(then);
        world.finish(Outcome::Unreachable);
        assert_eq!(world.state(), "Waiting 0", "{first:?}, {then:?}");
        world.sight(OPERATOR);
        world.finish(Outcome::Unreachable);
        assert_eq!(world.state(), "Waiting 0", "{first:?}, {then:?}");
    }
    let mut world = World::new();
    world.work(OPERATOR);
    world.finish(Outcome::Failed);
    assert_eq!(world.state(), "Waiting 0", "it has answered");
}

#[test]
fn a_stopped_node_that_does_not_fit_waits_due_now() {
    let mut world = World::new();
    working(&mut world);
    world.capacity = 0;
    world.finish(Outcome::Stopped(Closed::Deadline));
    assert_eq!(world.state(), "Waiting 0");
    assert_eq!(world.node().attempts, 0);
}

#[test]
fn a_stopped_attempt_is_not_counted() {
    let mut world = World::new();
    working(&mut world);
    world.finish(Outcome::Stopped(Closed::Deadline));
    assert_eq!(world.queue.pop().unwrap().0, Queue::First);
    let key = world.key();
    assert_eq!(world.registry.take(&key, world.now).unwrap().attempt, 1);
}

#[test]
fn failures_in_a_row_wait_longer_and_longer() {
    let mut world = World::new();
    for expected in [0, 0, 60, 120, 240, 480, 960, 1800, 1800] {
        world.work(OPERATOR);
        world.finish(Outcome::Failed);
        assert_eq!(world.state(), format!("Waiting {expected}"));
    }
    for _ in 0..100 {
        world.work(OPERATOR);
        world.finish(Outcome::Unreachable);
    }
    assert_eq!(world.state(), "Waiting 1800");
}

#[test]
fn faults_of_ours_never_grow() {
    for outcome in [Outcome::HelperFailed, Outcome::WrongToken, Outcome::Misconfigured] {
        let mut world = World::new();
        for _ in 0..10 {
            world.work(OPERATOR);
            world.finish(outcome.clone());
            assert_eq!(world.state(), "Waiting 60");
        }
        // They are counted all the same, for whoever looks.
        assert_eq!(world.node().failures, 10);
        world.work(OPERATOR);
        world.finish(Outcome::Failed);
        assert_eq!(world.state(), "Waiting 0", "its own first failure is free");
    }
}

#[test]
fn what_a_node_did_well_ends_its_row_of_failures() {
    check_row(Outcome::Deferred, 0);
    check_row(Outcome::Busy, 3);
    check_row(Outcome::HelperFailed, 4);
    check_row(Outcome::Misconfigured, 4);
    check_row(Outcome::Stopped(Closed::Deadline), 3);
}

#[track_caller]
fn check_row(outcome: Outcome, failures: u16) {
    let mut world = World::new();
    failed_thrice(&mut world);
    world.work(OPERATOR);
    world.finish(outcome);
    assert_eq!(world.node().failures, failures);
}

#[test]
fn a_reboot_explains_one_failure_but_not_a_row() {
    let mut world = World::new();
    failed_thrice(&mut world);
    world.work(OPERATOR);
    world.sight(EVENT);
    world.finish(Outcome::Failed);
    assert_eq!(world.state(), "Waiting 0");
    world.work(DISCOVERY);
    world.sight(Sighting::Event { id: "third" });
    world.finish(Outcome::Failed);
    assert_eq!(world.state(), "Waiting 240");
    world.work(OPERATOR);
    world.sight(Sighting::Event { id: "fourth" });
    world.finish(Outcome::Failed);
    assert_eq!(world.state(), "Waiting 0");
}

#[test]
fn an_excuse_is_not_spent_on_a_failure_that_costs_no_wait() {
    let mut world = World::new();
    for id in ["second", "third", "fourth"] {
        world.work(OPERATOR);
        world.sight(Sighting::Event { id });
        world.finish(Outcome::Failed);
        assert_eq!(world.state(), "Waiting 0");
    }
}

#[test]
fn an_unreachable_node_is_excused_right_after_a_reconnect() {
    let mut world = World::new();
    failed_thrice(&mut world);
    world.work(OPERATOR);
    world.just_reconnected = true;
    let finished = world.finish(Outcome::Unreachable);
    assert_eq!(finished.tally, Tally::default());
    assert_eq!(world.state(), "Waiting 0");
    assert_eq!((world.node().failures, world.node().attempts), (3, 3));
    assert_eq!(world.node().last_error, "because");
    // Other failures are the node's own.
    world.work(DISCOVERY);
    world.finish(Outcome::Failed);
    assert_eq!(world.state(), "Waiting 120");
}

#[test]
fn the_prober_ends_a_node_that_no_worker_took() {
    let mut world = World::new();
    queued(&mut world);
    let finished = world.finish(Outcome::Unreachable);
    assert_eq!(finished.tally, Tally::of(&Outcome::Unreachable));
    assert_eq!(world.state(), "Waiting 0");
    assert_eq!(world.node().failures, 1);
}

#[test]
fn an_event_during_the_work_is_judged_by_what_became_of_it() {
    // Seconds after the start of the work: `configure` answered, `restart` answered, event.
    check_remembered(5, Some(6), 4, "Settling 60");
    check_remembered(5, Some(6), 5, "Settling 60");
    check_remembered(5, Some(6), 7, "Settling 60");
    check_remembered(5, Some(6), 8, "Queued");
    check_remembered(5, None, 4, "Settling 60");
    check_remembered(5, None, 6, "Queued");
}

#[track_caller]
fn check_remembered(configured: u64, restarted: Option<u64>, event: u64, expected: &str) {
    let mut world = World::new();
    working(&mut world);
    let start = world.now;
    let at = |secs| start + Duration::from_secs(secs);
    world.now = at(event);
    world.sight(EVENT);
    world.now = at(10);
    world.finish(Outcome::Provisioned {
        configured_at: at(configured),
        restarted_at: restarted.map(at),
    });
    assert_eq!(world.state(), expected);
}

#[test]
fn an_event_after_an_upgrade_was_sent_is_what_was_waited_for() {
    for (event, expected) in [(4, "Settling 600"), (6, "Queued")] {
        let mut world = World::new();
        working(&mut world);
        let start = world.now;
        world.now = start + Duration::from_secs(event);
        world.sight(EVENT);
        world.now = start + Duration::from_secs(10);
        world.finish(upgrade_sent(start + Duration::from_secs(5)));
        assert_eq!(world.state(), expected);
    }
}

#[test]
fn a_node_that_comes_back_again_and_again_waits_longer_and_longer() {
    let mut world = World::new();
    configured(&mut world);
    assert_eq!(world.registry.take_returned(), None);
    assert!(matches!(world.sight(EVENT), Sighted::Queued(_)));
    let returned = world.registry.take_returned().unwrap();
    assert_eq!(returned.times, 1);
    assert_eq!(world.registry.take_returned(), None, "said once");
    for (times, expected) in (2..).zip([60, 120, 240, 480, 960, 1800, 1800]) {
        world.take_and_configure();
        world.pass(5);
        let id = format!("after {expected} at {:?}", world.now);
        assert_eq!(world.sight(Sighting::Event { id: &id }), Sighted::NotDue);
        assert_eq!(world.state(), format!("Waiting {expected}"));
        assert!(world.node().last_error.starts_with("came back unprovisioned"));
        assert_eq!(world.registry.take_returned().map(|node| node.times), Some(times));
        world.pass(expected);
        assert!(matches!(world.sight(DISCOVERY), Sighted::Queued(_)));
    }
}

#[test]
fn returns_are_forgotten_after_a_day_without_one() {
    let mut world = World::new();
    configured_again(&mut world);
    world.now += KEPT_FOR;
    world.registry.sweep(world.now);
    assert!(world.registry.kept.is_empty() && world.registry.kept_by_age.is_empty());
    world.work(Sighting::Event { id: "third" });
    world.configure();
    world.pass(5);
    assert!(matches!(world.sight(Sighting::Event { id: "fourth" }), Sighted::Queued(_)));
}

#[test]
fn an_upgrade_is_stuck_after_two_tries_that_changed_nothing() {
    let mut world = World::new();
    let taken = world.work(EVENT);
    assert_eq!(taken.upgrade, None);
    for (tries, is_stuck) in [(1, false), (2, true)] {
        world.finish(upgrade_sent(world.now));
        let id = format!("after upgrade {tries}");
        let taken = world.work(Sighting::Event { id: &id }).upgrade.unwrap();
        assert_eq!(taken.is_stuck("0.31.0", "0.30.0"), is_stuck);
        assert!(!taken.is_stuck("0.32.0", "0.30.0"), "another target");
        assert!(!taken.is_stuck("0.31.0", "0.30.1"), "another version");
    }
    // A change of version begins a new count.
    world.finish(Outcome::UpgradeSent {
        version: "0.31.0".into(),
        from: "0.30.1".into(),
        sent_at: world.now,
    });
    let taken = world.work(Sighting::Event { id: "last" }).upgrade.unwrap();
    assert!(!taken.is_stuck("0.31.0", "0.30.1"));
}

#[test]
fn a_denied_node_is_forgotten_and_not_seen_until_it_is_allowed() {
    for make in [absent, queued, configured, failed_thrice] {
        let mut world = World::new();
        make(&mut world);
        let key = world.key();
        assert_eq!(world.registry.deny(&world.identity, world.now), Ok(true));
        world.check();
        assert_eq!(world.registry.deny(&world.identity, world.now), Ok(false), "it is already");
        assert!(!world.registry.is_current(&key));
        assert_eq!(world.registry.take(&key, world.now), None);
        for what in [DISCOVERY, EVENT, LATE_ANSWER, OPERATOR] {
            assert_eq!(world.sight(what), Sighted::Denied);
        }
        assert!(world.registry.node(&world.identity).is_none());
        assert!(world.registry.allow(&world.identity) && !world.registry.allow(&world.identity));
        assert!(matches!(world.sight(DISCOVERY), Sighted::Queued(_)));
    }
}

#[test]
fn a_node_that_is_denied_while_it_is_worked_on_is_finished_counted_and_forgotten() {
    for outcome in [stuck(), Outcome::Failed, Outcome::Stopped(Closed::Deadline)] {
        let mut world = World::new();
        working(&mut world);
        let key = world.key();
        assert_eq!(world.registry.deny(&world.identity, world.now), Ok(true));
        assert!(world.registry.is_current(&key), "it goes on");
        assert_eq!(world.sight(EVENT), Sighted::Denied);
        let finished = world.finish(outcome.clone());
        assert_eq!(finished, Finished { tally: Tally::of(&outcome), next: Next::Absent });
        world.check();
    }
}

#[test]
fn no_more_are_denied_than_there_may_be() {
    let mut world = World::new();
    for number in 0..DENIED_MAX {
        let identity = Identity::parse(&format!("n{number}.other.example.net")).unwrap();
        assert_eq!(world.registry.deny(&identity, world.now), Ok(true));
    }
    assert_eq!(world.registry.deny(&world.identity, world.now), Err(TooManyDenied));
    assert_eq!(world.registry.denied().len(), DENIED_MAX);
    world.registry.clear();
    assert_eq!(world.registry.denied().len(), DENIED_MAX, "whoever leads, it stays denied");
}

#[test]
fn nodes_are_visited_part_by_part_whatever_happens_in_between() {
    let mut world = World::new();
    for number in 0..25 {
        world.identity = Identity::parse(&format!("n{number:02}.example.net")).unwrap();
        world.sight(DISCOVERY);
        // Some of the same moment.
        world.pass(u64::from(number % 3 == 0));
    }
    let mut names = Vec::new();
    let mut mark = None;
    let mut parts = 0;
    loop {
        let mut visit = |node: Node<'_>| names.push(node.identity.to_string());
        mark = world.registry.visit(Kind::Queued, mark.as_ref(), 10, &mut visit);
        parts += 1;
        if mark.is_none() {
            break;
        }
        // The one the mark stands for goes, and so does one of the next part.
        for gone in ["n09.example.net", "n12.example.net"] {
            let identity = Identity::parse(gone).unwrap();
            world.registry.deny(&identity, world.now).unwrap();
        }
    }
    names.sort();
    let all = (0..25).filter(|number| *number != 12).map(|n| format!("n{n:02}.example.net"));
    assert_eq!(names, all.collect::<Vec<_>>());
    assert_eq!(parts, 3);
    for kind in [Kind::Working, Kind::Waiting, Kind::Settling] {
        let end = world.registry.visit(kind, None, 10, &mut |node| panic!("{node:?}"));
        assert_eq!(end, None);
    }
}

#[test]
fn a_node_is_stale_once_two_discoveries_and_two_minutes_missed_it() {
    check_stale(&[0, 60, 120], 121, true);
    check_stale(&[0, 60, 120], 119, false);
    check_stale(&[0, 130], 131, false);
    check_stale(&[130, 140], 141, true);
    check_stale(&[], 1000, false);
}

/// Queues a node at zero, runs discoveries from zero on at the given seconds, the last one ending at `end`.
#[track_caller]
fn check_stale(starts: &[u64], end: u64, expected: bool) {
    let mut world = World::new();
    // Discoveries that the node answered don't count against it.
    world.registry.discovery_started(world.now - INTERVAL);
    world.registry.discovery_completed(world.now - INTERVAL);
    queued(&mut world);
    let zero = world.now;
    let mut stale = Vec::new();
    for (i, start) in starts.iter().enumerate() {
        let end = if i + 1 == starts.len() { end } else { *start };
        // Nobody is missed by the one that runs while it is found.
        world.registry.discovery_started(zero + Duration::from_secs(*start));
        stale.extend(world.registry.discovery_completed(zero + Duration::from_secs(end)));
    }
    assert_eq!(!stale.is_empty(), expected);
    assert_eq!(world.state() == "absent", expected);
    world.check();
}

#[test]
fn a_sighting_keeps_a_queued_node_from_becoming_stale() {
    let mut world = World::new();
    queued(&mut world);
    for _ in 0..10 {
        world.pass(60);
        world.registry.discovery_started(world.now);
        world.sight(DISCOVERY);
        assert_eq!(world.registry.discovery_completed(world.now), []);
    }
    assert_eq!(world.state(), "Queued");
}

#[test]
fn a_discovery_that_did_not_complete_makes_nobody_stale() {
    let mut world = World::new();
    queued(&mut world);
    for _ in 0..10 {
        world.pass(60);
        world.registry.discovery_started(world.now);
    }
    assert_eq!(world.registry.discovery_completed(world.now), []);
    assert_eq!(world.registry.discovery_completed(world.now), []);
    assert_eq!(world.state(), "Queued");
}

#[test]
fn only_queued_nodes_become_stale() {
    for state in [working as fn(&mut World), configured, failed_once] {
        let mut world = World::new();
        state(&mut world);
        for _ in 0..3 {
            world.pass(200);
            world.registry.discovery_started(world.now);
            assert_eq!(world.registry.discovery_completed(world.now), []);
        }
    }
}

#[test]
fn a_sweep_forgets_what_has_expired() {
    let mut world = World::new();
    configured(&mut world);
    assert_eq!(world.registry.sweep(world.now), Swept::default());
    world.pass(60);
    assert_eq!(world.registry.sweep(world.now), Swept { settled: 1, unseen: 0 });
    failed_once(&mut world);
    world.now += KEPT_FOR - Duration::from_secs(1);
    assert_eq!(world.registry.sweep(world.now), Swept::default());
    world.pass(1);
    assert_eq!(world.registry.sweep(world.now), Swept { settled: 0, unseen: 1 });
    assert_eq!(world.state(), "absent");
}

#[test]
fn a_reload_makes_waiting_nodes_due_but_queues_none() {
    for state in [busy as fn(&mut World), failed_thrice, returned_twice] {
        let mut world = World::new();
        state(&mut world);
        let queued = world.queue.len();
        world.registry.reload(Limits::new(INTERVAL * 2, RETRY_MAX), world.now);
        assert_eq!(world.state(), "Waiting 0");
        assert_eq!(world.queue.len(), queued);
        assert!(matches!(world.sight(DISCOVERY), Sighted::Queued(_)));
    }
}

#[test]
fn a_key_whose_time_has_passed_holds_nothing() {
    let mut world = World::new();
    queued(&mut world);
    let old = world.key();
    world.registry.clear();
    world.sight(DISCOVERY);
    assert!(!world.registry.is_current(&old));
    assert_eq!(world.registry.take(&old, world.now), None);
    let report = report(Outcome::Unreachable);
    let finished = world
        .registry
        .finish(&old, &report, world.now, false, false, &mut |_, _| panic!("nothing is pushed"));
    let nothing = Finished { tally: Tally::default(), next: Next::NotCurrent };
    assert_eq!(finished, nothing);
    assert_eq!(world.state(), "Queued");
    let key = world.key();
    assert!(world.registry.take(&key, world.now).is_some());
    assert_eq!(world.registry.take(&key, world.now), None, "taken only once");
    assert_eq!(world.finish(Outcome::Deferred).tally, Tally::of(&Outcome::Deferred));
    assert!(!world.registry.is_current(&key));
    assert_eq!(world.finish(Outcome::Deferred), nothing, "finished only once");
}

#[test]
fn events_cannot_keep_a_queued_node_from_being_worked() {
    let mut world = World::new();
    queued(&mut world);
    let mut asked_again = 0;
    for i in 0..100 {
        let id = i.to_string();
        if matches!(world.sight(Sighting::Event { id: &id }), Sighted::AskAgain(_)) {
            asked_again += 1;
        }
    }
    assert_eq!(asked_again, ASKS_AGAIN_MAX);
    let taken = world.registry.take(&world.key(), world.now).unwrap();
    assert_eq!(taken.announced_at, Some(world.now));
}

#[test]
fn first_attempts_go_to_the_work_queue_and_all_others_to_the_retry_queue() {
    for (state, expected) in [
        (absent as fn(&mut World), Queue::First),
        (failed_once, Queue::Retry),
        (busy_long_ago, Queue::Retry),
        (configured, Queue::Retry),
        (upgraded, Queue::Retry),
        (configured_long_ago, Queue::First),
    ] {
        let mut world = World::new();
        state(&mut world);
        assert!(matches!(world.sight(EVENT), Sighted::Queued(_)));
        assert_eq!(world.queue.last().unwrap().0, expected);
    }
}

#[test]
fn attempts_are_counted_until_one_succeeds() {
    let mut world = World::new();
    for expected in 1..5 {
        assert_eq!(world.work(OPERATOR).attempt, expected);
        world.pass(5);
        world.finish(Outcome::Busy);
    }
    world.pass(1);
    assert_eq!(world.work(OPERATOR).attempt, 5);
    world.configure();
    world.pass(60);
    assert_eq!(world.work(OPERATOR).attempt, 1);
}

#[test]
fn every_node_that_waits_has_a_reason() {
    for state in [failed_once as fn(&mut World), busy, returned_twice] {
        let mut world = World::new();
        state(&mut world);
        assert_ne!(world.node().last_error, "");
    }
    let mut world = World::new();
    working(&mut world);
    let silent = Report::new(Outcome::Refused, "");
    world.registry.finish(&world.key(), &silent, world.now, false, false, &mut |_, _| true);
    assert_eq!(world.node().last_error, "refused");
}

#[test]
fn a_long_error_keeps_its_beginning_and_its_end_and_is_cut_between_characters() {
    for lead in 0..4 {
        let mut world = World::new();
        working(&mut world);
        let end = "x".repeat(lead);
        let reason = format!("{end}{}{end}", "\u{1f980}".repeat(1000));
        let report = Report::new(Outcome::Failed, reason);
        world.registry.long_errors_bytes = LONG_ERRORS_BYTES_MAX - 4;
        world.registry.finish(&world.key(), &report, world.now, false, false, &mut |_, _| true);
        let kept = world.node().last_error.len();
        assert!((BRIEF_BYTES_MAX - 7..=BRIEF_BYTES_MAX).contains(&kept), "{kept}");
    }
    let reason = format!("could not fetch CSR: {}of this: timed out", "because ".repeat(50));
    assert_eq!(
        without_middle(&reason),
        "could not fetch CSR: because because … because because of this: timed out"
    );
}

#[test]
fn long_errors_are_kept_whole_while_there_is_room_for_them() {
    let mut world = World::new();
    world.capacity = 60_000;
    let reason = "x".repeat(1_000);
    let known = LONG_ERRORS_BYTES_MAX / 1_000 + 10;
    for at in 0..known {
        world.identity = Identity::parse(&format!("n{at}")).unwrap();
        working(&mut world);
        let report = Report::new(Outcome::Failed, &*reason);
        world.registry.finish(&world.key(), &report, world.now, false, false, &mut |_, _| true);
    }
    let whole = |world: &World| {
        world.registry.nodes().filter(|node| node.last_error.len() == 1_000).count()
    };
    assert_eq!(whole(&world), LONG_ERRORS_BYTES_MAX / 1_000);
    world.check();
    // Those that go make room.
    world.registry.clear();
    assert_eq!(whole(&world), 0);
    world.check();
}

#[test]
fn the_error_of_a_node_does_not_repeat_its_name() {
    let mut world = World::new();
    working(&mut world);
    let reason = format!("could not validate JWT: {}: token is expired", world.key().identity);
    let report = Report::new(Outcome::Refused, reason);
    world.registry.finish(&world.key(), &report, world.now, false, false, &mut |_, _| true);
    assert_eq!(world.node().last_error, "could not validate JWT: token is expired");
}

#[test]
fn the_number_of_known_nodes_is_bounded() {
    let limits =
        Limits { waiting_max: 3, settling_max: 3, kept_max: 3, ..World::new().registry.limits };
    let outcomes = [Outcome::Failed, Outcome::ShutDown, upgrade_sent(Instant::now())];
    for outcome in outcomes {
        let mut world = World::new();
        world.registry = Registry::new(limits);
        for i in 0..10 {
            world.identity = Identity::parse(&format!("n{i}")).unwrap();
            world.pass(1);
            world.work(DISCOVERY);
            world.finish(outcome.clone());
            world.check();
        }
        assert_eq!(world.registry.nodes().count(), 3);
        for i in 7..10 {
            let identity = Identity::parse(&format!("n{i}")).unwrap();
            assert!(world.registry.node(&identity).is_some(), "the oldest go first");
        }
        assert!(world.registry.kept.len() <= 3);
    }
}

#[test]
fn a_known_node_is_small() {
    // Allocators round up to 16 bytes and keep 8 of their own.
    let allocated = |bytes: usize| (bytes + 8).next_multiple_of(16);
    let map_slot = size_of::<(Identity, Box<Entry>)>() + 1;
    let set_slot = size_of::<(Instant, Identity)>();
    let identity = "node-12345.example.net".len() + 2 * size_of::<usize>();
    let node = map_slot * 16 / 7 // A map that has just grown is 7/16 full.
            + set_slot * 11 / 6 // So is a tree filled in order: 6 of 11 slots.
            + allocated(size_of::<Entry>())
            + allocated(identity)
            + allocated(BRIEF_BYTES_MAX);
    assert!(node < 400, "{node} bytes");
}

#[test]
fn a_hundred_thousand_nodes_are_handled_at_once() {
    let mut world = World::new();
    world.capacity = 60_000;
    let mut refused = 0;
    for i in 0..100_000 {
        world.identity = Identity::parse(&format!("node{i}.example.net")).unwrap();
        if world.sight(DISCOVERY) == Sighted::QueueFull {
            refused += 1;
        }
    }
    assert_eq!(refused, 40_000);
    let counts = Counts { queued: 60_000, ..Counts::default() };
    assert_eq!(world.registry.counts(), counts);
    world.check();
}

impl Registry {
    /// Panics unless entries and indexes agree and bounds hold.
    pub fn check(&self) {
        for (identity, entry) in &self.entries {
            let (index, at) = match entry.state {
                State::Queued { .. } => (&self.queued, entry.seen),
                State::Waiting { .. } => (&self.waiting, entry.seen),
                State::Settling { until, .. } => (&self.settling, until),
                State::Working { since, .. } => (&self.working, since),
            };
            assert!(index.contains(&(at, identity.clone())), "{identity} is not in its index");
            let is_working = matches!(entry.state, State::Working { .. });
            assert!(is_working || !self.is_denied(identity), "{identity} is denied and known");
            let waits = matches!(entry.state, State::Waiting { .. });
            assert!(entry.is_heard || !waits, "{identity} waits and was never heard");
        }
        let indexes = [&self.queued, &self.waiting, &self.settling, &self.working];
        let indexed: usize = indexes.into_iter().map(BTreeSet::len).sum();
        assert_eq!(indexed, self.entries.len(), "an index holds too much");
        let long: usize = self.entries.values().map(|entry| entry.long_error_bytes()).sum();
        assert_eq!(long, self.long_errors_bytes, "long errors are counted wrongly");
        assert!(self.waiting.len() <= self.limits.waiting_max);
        assert!(self.settling.len() <= self.limits.settling_max);
        assert!(self.kept.len() <= self.limits.kept_max);
        assert_eq!(self.kept.len(), self.kept_by_age.len());
    }
}

/// A registry, a queue and a clock, and the one node most tests are about.
struct World {
    registry: Registry,
    identity: Identity,
    now: Instant,
    queue: Vec<(Queue, Key)>,
    capacity: usize,
    just_reconnected: bool,
    gate_lost: bool,
}

impl World {
    fn new() -> World {
        World {
            registry: Registry::new(Limits::new(INTERVAL, RETRY_MAX)),
            identity: Identity::parse("n1.example.net").unwrap(),
            now: Instant::now() + KEPT_FOR,
            queue: Vec::new(),
            capacity: 1000,
            just_reconnected: false,
            gate_lost: false,
        }
    }

    fn pass(&mut self, secs: u64) {
        self.now += Duration::from_secs(secs);
    }

    fn sight(&mut self, what: Sighting<'_>) -> Sighted {
        let World { registry, identity, now, queue, capacity, .. } = self;
        registry.sight(identity, what, *now, &mut |which, key| {
            let fits = queue.len() < *capacity;
            if fits {
                queue.push((which, key.clone()));
            }
            fits
        })
    }

    /// The key of the node as it is now.
    fn key(&self) -> Key {
        let generation = self.registry.node(&self.identity).map_or(0, |node| node.generation);
        Key { identity: self.identity.clone(), generation }
    }

    #[track_caller]
    fn node(&self) -> Node<'_> {
        self.registry.node(&self.identity).unwrap()
    }

    /// Sights the node if it is not queued, and has a worker take it.
    #[track_caller]
    fn work(&mut self, what: Sighting<'_>) -> Taken {
        self.sight(what);
        let key = self.key();
        self.registry.take(&key, self.now).expect("the node is queued")
    }

    fn finish(&mut self, outcome: Outcome) -> Finished {
        let key = self.key();
        let World { registry, now, queue, capacity, .. } = self;
        registry.finish(
            &key,
            &report(outcome),
            *now,
            self.just_reconnected,
            self.gate_lost,
            &mut |which, key| {
                let fits = queue.len() < *capacity;
                if fits {
                    queue.push((which, key.clone()));
                }
                fits
            },
        )
    }

    fn configure(&mut self) {
        let now = self.now;
        self.finish(Outcome::Provisioned { configured_at: now, restarted_at: Some(now) });
    }

    #[track_caller]
    fn take_and_configure(&mut self) {
        let key = self.key();
        self.registry.take(&key, self.now).expect("the node is queued");
        self.configure();
    }

    /// The state, and the seconds left of it.
    fn state(&self) -> String {
        let left = |at: Instant| at.saturating_duration_since(self.now).as_secs();
        match self.registry.node(&self.identity).map(|node| node.state) {
            None => "absent".into(),
            Some(NodeState::Queued { .. }) => "Queued".into(),
            Some(NodeState::Working { .. }) => "Working".into(),
            Some(NodeState::Settling { until }) => format!("Settling {}", left(until)),
            Some(NodeState::Waiting { due }) => format!("Waiting {}", left(due)),
        }
    }

    fn check(&self) {
        self.registry.check();
    }
}

fn report(outcome: Outcome) -> Report {
    Report::new(outcome, "because")
}

fn upgrade_sent(sent_at: Instant) -> Outcome {
    Outcome::UpgradeSent { version: "0.31.0".into(), from: "0.30.0".into(), sent_at }
}

fn stuck() -> Outcome {
    Outcome::UpgradeStuck { version: "0.31.0".into() }
}

fn absent(_: &mut World) {}

fn queued(world: &mut World) {
    world.sight(COPY);
}

fn working(world: &mut World) {
    world.work(COPY);
}

fn configured_just_now(world: &mut World) {
    working(world);
    world.configure();
}

fn configured(world: &mut World) {
    configured_just_now(world);
    world.pass(5);
}

fn configured_unanswered(world: &mut World) {
    working(world);
    let configured_at = world.now;
    world.finish(Outcome::Provisioned { configured_at, restarted_at: None });
}

fn configured_again(world: &mut World) {
    configured(world);
    world.work(Sighting::Event { id: "between" });
    world.configure();
    world.pass(5);
}

fn configured_long_ago(world: &mut World) {
    configured(world);
    world.pass(55);
}

fn upgraded(world: &mut World) {
    working(world);
    world.finish(upgrade_sent(world.now));
}

fn shut_down(world: &mut World) {
    working(world);
    world.finish(Outcome::ShutDown);
    world.pass(5);
}

fn shut_down_just_now(world: &mut World) {
    working(world);
    world.finish(Outcome::ShutDown);
}

fn failed_once(world: &mut World) {
    working(world);
    world.finish(Outcome::Failed);
}

fn failed_thrice(world: &mut World) {
    for _ in 0..3 {
        world.work(COPY);
        world.finish(Outcome::Failed);
    }
}

fn failed_thrice_long_ago(world: &mut World) {
    failed_thrice(world);
    world.pass(60);
}

fn busy(world: &mut World) {
    working(world);
    world.finish(Outcome::Busy);
}

fn busy_long_ago(world: &mut World) {
    busy(world);
    world.pass(120);
}

fn returned_twice(world: &mut World) {
    configured_again(world);
    world.sight(Sighting::Event { id: "third" });
}

/// Brings a node into a state, shows it, and expects "what became of it: state, seconds left".
#[track_caller]
fn check_sighting(state: fn(&mut World), what: Sighting<'_>, expected: &str) {
    let mut world = World::new();
    state(&mut world);
    check_in(world, what, expected);
}

#[track_caller]
fn check_refused(state: fn(&mut World), what: Sighting<'_>, expected: &str) {
    let mut world = World::new();
    state(&mut world);
    world.capacity = 0;
    check_in(world, what, expected);
}

#[track_caller]
fn check_in(mut world: World, what: Sighting<'_>, expected: &str) {
    let queued = world.queue.len();
    let sighted = world.sight(what);
    let is_queued = matches!(sighted, Sighted::Queued(_));
    assert_eq!(world.queue.len() - queued, usize::from(is_queued));
    let sighted = match sighted {
        Sighted::Queued(key) => {
            assert_eq!(world.queue.last().map(|(_, pushed)| pushed), Some(&key));
            assert!(world.registry.is_current(&key));
            "queued"
        }
        Sighted::Known => "known",
        Sighted::NotDue => "not due",
        Sighted::QueueFull => "queue full",
        Sighted::Denied => "denied",
        Sighted::Others => "others",
        Sighted::AskAgain(key) => {
            assert_eq!(key, world.key());
            "ask again"
        }
    };
    let mut state = world.state();
    if state.starts_with("Settling") {
        state.truncate("Settling".len());
    }
    assert_eq!(format!("{sighted}: {state}"), expected);
    if let Some(node) = world.registry.node(&world.identity) {
        assert_eq!(node.seen, world.now, "every sighting refreshes it");
    }
    world.check();
}

#[track_caller]
fn check_outcome(
    outcome: impl FnOnce(Instant) -> Outcome,
    counter: &str,
    label: &str,
    expected: &str,
) {
    let mut world = World::new();
    working(&mut world);
    let finished = world.finish(outcome(world.now));
    let counted = match finished.tally {
        Tally { provisioned: true, provision_errors: false, .. } => "provisioned",
        Tally { provisioned: false, provision_errors: true, .. } => "error",
        Tally { provisioned: false, provision_errors: false, .. } => "",
        Tally { .. } => "both",
    };
    assert_eq!(counted, counter);
    assert_eq!(finished.tally.outcome.unwrap_or_default(), label);
    assert_eq!(world.state(), expected);
    let next = match finished.next {
        Next::Absent => "absent",
        Next::Queued(_) => "Queued",
        Next::Settling => "Settling",
        Next::Waiting { .. } => "Waiting",
        Next::NotCurrent => "not current",
    };
    assert!(expected.starts_with(next), "{next}");
    world.check();
}
