//! Processes of a real shell that answer, fail, hang or vanish.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};

use super::super::farewell::THREADS_MAX;
use super::super::tests::{Directory, LONG, SHORT, Watch, input};
use super::*;
use crate::protocol::Identity;

#[test]
fn one_process_answers_for_a_thousand_nodes() {
    let bench = Bench::new(1, "", ANSWER);
    for number in 0..1000 {
        bench.says(&format!("n{number}"));
    }
    assert_eq!(bench.counts(), (1, 0));
}

#[test]
fn each_of_many_threads_gets_the_answer_for_its_own_node() {
    let bench = Bench::new(3, "", ANSWER);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let bench = &bench;
            scope.spawn(move || {
                for number in 0..50 {
                    bench.says(&format!("n{thread}-{number}"));
                }
            });
        }
    });
    let (running, restarts) = bench.counts();
    assert!((1..=3).contains(&running), "{running}");
    assert_eq!(restarts, 0);
}

#[test]
fn processes_are_started_only_as_they_are_needed() {
    let directory = Directory::new();
    let (began, go) = (directory.fifo("began"), directory.fifo("go"));
    let wait = format!("echo $identity >{began}; read x <{go}; {ANSWER}");
    let bench = Bench::new(2, "", &wait);
    std::thread::scope(|scope| {
        let asking: Vec<_> = (0..3)
            .map(|at| {
                scope.spawn({
                    let bench = &bench;
                    move || bench.says(&format!("n{at}"))
                })
            })
            .collect();
        // Two are asked, and the third waits for one of them.
        let mut began = std::fs::OpenOptions::new().read(true).write(true).open(began).unwrap();
        let mut seen = BTreeSet::new();
        let mut line = [0; 3];
        for _ in 0..2 {
            began.read_exact(&mut line).unwrap();
            seen.insert(line);
        }
        assert_eq!((seen.len(), bench.counts().0), (2, 2));
        let mut go = std::fs::OpenOptions::new().read(true).write(true).open(go).unwrap();
        go.write_all(b"1\n2\n3\n").unwrap();
        for thread in asking {
            thread.join().unwrap();
        }
    });
    assert_eq!(bench.counts(), (2, 0));
    // One at a time, one is enough.
    let bench = Bench::new(8, "", ANSWER);
    for _ in 0..3 {
        bench.says("n1");
    }
    assert_eq!(bench.counts(), (1, 0));
}

#[test]
fn an_answer_after_its_time_is_never_given_to_another_node() {
    let watch = Watch::new();
    // It answers when it is asked about the next node, or when it has slept for long.
    let late = format!(
        "if [ $identity = n1 ]; then exec 9>{}; late=$id; elif [ $identity = n2 ]; then id=$late; identity=n1; {ANSWER}; \
             else {ANSWER}; fi; [ $identity = n3 ] || sleep 1000",
        watch.fifo()
    );
    let bench = Bench { timeout: SHORT, ..Bench::new(1, "", &late) };
    let pool = bench.pool();
    let error = bench.ask_of(&pool, "n1").unwrap_err();
    assert_eq!(
        error,
        "no answer from HELPER; with helper_mode persistent it must answer each line of its input, not the end of it \
             (signal: killed, at its time limit, ran T s)"
    );
    watch.all_ended();
    let error = bench.ask_of(&pool, "n2").unwrap_err();
    assert!(error.starts_with("HELPER wrote an answer to another request"), "{error}");
    assert_eq!(bench.ask_of(&pool, "n3").unwrap(), "n3");
}

#[test]
fn a_process_that_survives_its_group_speaks_to_nobody() {
    let directory = Directory::new();
    let (go, spoke) = (directory.fifo("go"), directory.fifo("spoke"));
    let survivor = format!(
        "trap '' PIPE; read x <{go}; printf '{{\\\"id\\\":\\\"%s\\\",\\\"reply\\\":{{\\\"msg\\\":\\\"n1\\\"}}}}\n' 0 1; echo $? >{spoke}"
    );
    let script =
        format!("if [ $identity = n1 ]; then setsid sh -c \"{survivor}\" & wait; fi; {ANSWER}");
    let bench = Bench { timeout: SHORT, ..Bench::new(1, "", &script) };
    let pool = bench.pool();
    assert!(bench.ask_of(&pool, "n1").unwrap_err().starts_with("no answer from HELPER"));
    let mut go = std::fs::OpenOptions::new().read(true).write(true).open(go).unwrap();
    go.write_all(b"now\n").unwrap();
    // Whatever became of its words, they were spoken.
    std::fs::read_to_string(spoke).unwrap();
    let bench = Bench { timeout: LONG, ..bench };
    for node in ["n2", "n3"] {
        assert_eq!(bench.ask_of(&pool, node).unwrap(), node);
    }
}

#[test]
fn a_crash_fails_one_node_and_another_process_goes_on() {
    let crash = format!("[ $identity = bad ] && {{ echo no database >&2; exit 3; }}; {ANSWER}");
    let bench = Bench::new(1, "", &crash);
    let pool = bench.pool();
    assert_eq!(bench.ask_of(&pool, "n1").unwrap(), "n1");
    assert_eq!(
        bench.ask_of(&pool, "bad").unwrap_err(),
        "HELPER ended without an answer (exit status 3, ran T s, last line on stderr: no database)"
    );
    assert_eq!(bench.ask_of(&pool, "n2").unwrap(), "n2");
    assert_eq!(bench.counts(), (1, 1));
}

#[test]
fn whatever_is_no_answer_to_the_question_ends_the_process() {
    let unasked = "HELPER wrote a line that was not asked for";
    for (answer, expected) in [
        ("echo Hello", "HELPER wrote a line that is no answer: expected value at line 1 column 1"),
        ("echo", "HELPER wrote an empty line"),
        (
            "echo '[]'",
            "HELPER wrote a line that is no answer: invalid length 0, expected struct Line with 3 elements at line 1 column 2",
        ),
        (
            "echo '{'",
            "HELPER wrote a line that is no answer: EOF while parsing an object at line 1 column 1; an answer must be on one line",
        ),
        (
            "printf '{\"id\":\"%s\"}\\n' $id",
            "HELPER wrote an answer with neither a reply nor an error",
        ),
        (
            "printf '{\"id\":\"%s\",\"reply\":null}\\n' $id",
            "HELPER wrote an answer with neither a reply nor an error",
        ),
        (
            "printf '{\"id\":\"%s\",\"reply\":{},\"error\":\"x\"}\\n' $id",
            "HELPER wrote an answer with both a reply and an error",
        ),
        (
            "printf '{\"id\":%s,\"reply\":{}}\\n' $id",
            "HELPER wrote an answer to another request: its id is 0",
        ),
        (
            "echo '{\"id\":\"9\",\"reply\":{}}'",
            "HELPER wrote an answer to another request: its id is \"9\"",
        ),
        ("echo '{\"reply\":{}}'", "HELPER wrote an answer without the id of its request"),
        ("echo '{\"Configuration\":{}}'", EXEC_STYLE),
        ("echo '{\"defer\":true,\"msg\":\"x\"}'", EXEC_STYLE),
        ("printf '{\"msg\":\"x\"}'; exit", EXEC_STYLE),
        ("printf '{\"id\":\"%s\",\"reply\":{}}\\nHello\\n' $id", &format!("{unasked}: Hello")),
        (
            "printf '{\"id\":\"%s\",\"reply\":{}}\\n\\n' $id",
            "HELPER wrote an empty line that was not asked for",
        ),
        // Not shown: it may hold a private key.
        (
            "printf '{\"id\":\"%s\",\"reply\":{}}\\n{\"key\":1}\\n' $id",
            &format!("{unasked}: {{... (9 bytes)"),
        ),
        ("printf '{\"id\":\"%s\",\"reply\":{}}' $id; exit", "HELPER ended without an answer"),
        ("exec >&-; read x", "HELPER ended without an answer"),
        ("exec <&- >&-; exec sleep 1000", "HELPER ended without an answer"),
    ] {
        let watch = Watch::new();
        let script = format!(
            "exec 9>{}; if [ $identity = bad ]; then {answer}; else {ANSWER}; fi",
            watch.fifo()
        );
        let bench = Bench::new(1, "", &script);
        let pool = bench.pool();
        let error = bench.ask_of(&pool, "bad").unwrap_err();
        assert_eq!(
            error.split(" (signal: ").next().unwrap().split(" (exit ").next().unwrap(),
            expected,
            "{answer}: {error}"
        );
        watch.all_ended();
        assert_eq!(bench.metrics.helper_processes.get(), 0);
    }
}

#[test]
fn a_line_between_two_questions_costs_no_node_its_attempt() {
    for mischief in ["echo extra", "printf half", "exit 0", "exec >&-"] {
        let (watch, directory) = (Watch::new(), Directory::new());
        let go = directory.fifo("go");
        let script = format!(
            "if [ $identity = n1 ]; then exec 9>{}; {ANSWER}; read x <{go}; {mischief}; exec 9>&-; else {ANSWER}; fi",
            watch.fifo()
        );
        let bench = Bench::new(1, "", &script);
        let pool = bench.pool();
        assert_eq!(bench.ask_of(&pool, "n1").unwrap(), "n1");
        std::fs::write(go, "now\n").unwrap();
        // It lets go of the other fifo when the mischief is done.
        watch.all_ended();
        for node in ["n2", "n3"] {
            assert_eq!(bench.ask_of(&pool, node).unwrap(), node, "{mischief}");
        }
        assert_eq!(bench.counts(), (1, 1), "{mischief}");
    }
}

#[test]
fn a_slow_start_is_waited_for() {
    let directory = Directory::new();
    let (began, ready) = (directory.fifo("began"), directory.fifo("ready"));
    let bench = Bench::new(1, &format!("echo began >{began}; read x <{ready}"), ANSWER);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| bench.says("n1"));
        assert_eq!(std::fs::read_to_string(began).unwrap(), "began\n");
        assert!(!asking.is_finished());
        std::fs::write(ready, "now\n").unwrap();
        asking.join().unwrap();
    });
}

#[test]
fn a_line_is_bounded_to_the_byte() {
    let padded = "printf '{\"id\":\"%s\",\"reply\":{\"msg\":\"n1\"}}' $id; echo";
    let length = r#"{"id":"0","reply":{"msg":"n1"}}"#.len();
    for (output_max, fits) in [(length, true), (length - 1, false)] {
        let bench = Bench { output_max, ..Bench::new(1, "", padded) };
        let pool = bench.pool();
        let answer = bench.ask_of(&pool, "n1");
        match fits {
            true => assert_eq!(answer.unwrap(), "n1"),
            false => assert_eq!(
                answer.unwrap_err(),
                format!(
                    "cannot read HELPER output: more than {output_max} bytes (signal: killed, ran T s)"
                )
            ),
        }
    }
    // A line without an end meets the bound, not the time.
    let bench = Bench::new(1, "", "cat /dev/zero");
    let error = bench.ask_of(&bench.pool(), "n1").unwrap_err();
    assert!(error.starts_with("cannot read HELPER output: more than 4194304 bytes"), "{error}");
}

#[test]
fn an_error_that_is_reported_does_not_end_the_process() {
    let script = format!(
        "case $identity in e) printf '{{\"id\":\"%s\",\"error\":\"no such node\\\\n\"}}\\n' $id ;; \
             u) printf '{{\"id\":\"%s\",\"reply\":{{\"defer\":1}}}}\\n' $id ;; *) {ANSWER} ;; esac"
    );
    let bench = Bench::new(1, "", &script);
    let pool = bench.pool();
    assert_eq!(bench.ask_of(&pool, "e").unwrap_err(), "HELPER failed: no such node\\n (ran T s)");
    assert_eq!(
        bench.ask_of(&pool, "u").unwrap_err(),
        "cannot decode output from HELPER: defer: invalid type: integer, expected a boolean at line 1 column 10 (ran T s)"
    );
    assert_eq!(bench.ask_of(&pool, "n1").unwrap(), "n1");
    assert_eq!(bench.counts(), (1, 0));
}

#[test]
fn a_helper_written_for_the_other_mode_is_told_so() {
    // It waits for the end of its input.
    let bench = Bench { timeout: SHORT, ..Bench::of("cat >/dev/null; echo '{}'") };
    let error = bench.ask_of(&bench.pool(), "n1").unwrap_err();
    assert!(error.contains("it must answer each line of its input, not the end of it"), "{error}");
    // It doesn't.
    let bench = Bench::of("echo '{\"configuration\":{\"a\":\"b\"}}'");
    let error = bench.ask_of(&bench.pool(), "n1").unwrap_err();
    assert!(error.starts_with(EXEC_STYLE), "{error}");
}

#[test]
fn what_it_writes_to_stderr_belongs_to_the_node_it_is_asked_about() {
    let script = format!("echo about $identity >&2; {ANSWER}; echo after >&2");
    let bench = Bench::new(1, "", &script);
    let pool = bench.pool();
    for node in ["n1", "n2", "n3"] {
        let identity = Identity::parse(node).unwrap();
        let asked = bench.put(&pool, &input(&identity, ""));
        assert!(asked.result.is_ok());
        let lines = asked.stderr.lines();
        assert!(lines.iter().any(|line| *line == format!("about {node}")), "{lines:?}");
        // What came between two questions may be seen with the next, but no node hears of another.
        assert!(lines.iter().all(|line| line.ends_with(node) || line == "after"), "{lines:?}");
    }
}

#[test]
fn a_large_question_and_much_to_say_on_stderr_block_nobody() {
    let script = format!(
        "head -c 1000000 /dev/zero | tr '\\0' x >&2; {ANSWER}; head -c 1000000 /dev/zero >&2"
    );
    let bench = Bench::new(1, "", &script);
    let pool = bench.pool();
    let inventory = "x".repeat(300_000);
    for node in ["n1", "n2"] {
        let identity = Identity::parse(node).unwrap();
        let asked = bench.put(&pool, &input(&identity, &inventory));
        assert_eq!(
            asked.result.map(|answer| answer.msg).map_err(|(failure, _)| failure).unwrap(),
            node
        );
    }
}

#[test]
fn it_finds_out_from_its_environment_that_it_stays() {
    let bench = Bench::new(1, "", &ANSWER.replace("$identity", "$CHORIA_PROVISIONER_HELPER"));
    assert_eq!(bench.ask_of(&bench.pool(), "n1").unwrap(), "persistent/1");
}

#[test]
fn an_abort_ends_the_wait_for_an_answer_and_the_process() {
    let watch = Watch::new();
    let directory = Directory::new();
    let began = directory.fifo("began");
    let script = format!("exec 9>{}; echo began >{began}; sleep 1000", watch.fifo());
    let (sender, abort) = crossbeam_channel::bounded(0);
    let bench = Bench { abort, ..Bench::new(1, "", &script) };
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| bench.ask_of(&bench.pool(), "n1"));
        assert_eq!(std::fs::read_to_string(began).unwrap(), "began\n");
        drop(sender);
        let error = asking.join().unwrap().unwrap_err();
        assert!(error.starts_with("HELPER was killed because the provisioner stops"), "{error}");
    });
    watch.all_ended();
}

#[test]
fn an_abort_ends_the_wait_for_a_process() {
    let (sender, abort) = crossbeam_channel::bounded(0);
    let bench = Bench { abort, ..Bench::new(1, "", ANSWER) };
    let pool = bench.pool();
    let held = pool.take(Instant::now() + LONG, &bench.abort).ok().unwrap();
    drop(sender);
    let error = bench.ask_of(&pool, "n1").unwrap_err();
    assert_eq!(error, "HELPER was killed because the provisioner stops");
    pool.give_back(held.0);
}

#[test]
fn whoever_finds_all_processes_busy_for_too_long_is_told_so() {
    let bench = Bench { timeout: SHORT, ..Bench::new(1, "", ANSWER) };
    let pool = bench.pool();
    let held = pool.take(Instant::now() + LONG, &bench.abort).ok().unwrap();
    assert_eq!(bench.ask_of(&pool, "n1").unwrap_err(), "all processes of HELPER were busy");
    pool.give_back(held.0);
}

#[test]
fn a_helper_that_does_not_start_is_left_alone_for_longer_and_longer() {
    let directory = Directory::new();
    let bench = Bench::of(&format!("echo x >>{}; exit 1", directory.path("starts")));
    let pool = bench.pool();
    let ended = "HELPER ended without an answer (exit status 1, ran T s)";
    // 0.1, 0.2, 0.4 and 0.8 s are waited for, 1.6 s is not.
    for _ in 0..5 {
        assert_eq!(bench.ask_of(&pool, "n1").unwrap_err(), ended);
    }
    let error = bench.ask_of(&pool, "n1").unwrap_err();
    assert!(
        error.starts_with("no process of HELPER runs, and none is started for another 1."),
        "{error}"
    );
    let starts = std::fs::read_to_string(directory.path("starts")).unwrap();
    assert_eq!(starts, "x\n".repeat(5));
    assert_eq!(bench.counts(), (0, 4));
}

#[test]
fn stopping_lets_processes_end_by_themselves() {
    let directory = Directory::new();
    let (watch, last) = (Watch::new(), directory.path("last"));
    let script = format!(
        "exec 9>{}; head -c 1000000 /dev/zero >&2; while read -r line; do {PARSE}; {ANSWER}; done; \
             head -c 1000000 /dev/zero; echo bye >{last}",
        watch.fifo()
    );
    let bench = Bench::of(&script);
    let pool = bench.pool();
    assert_eq!(bench.ask_of(&pool, "n1").unwrap(), "n1");
    pool.stop(LONG, &bench.abort);
    assert_eq!(std::fs::read_to_string(last).unwrap(), "bye\n");
    watch.all_ended();
    assert_eq!(bench.metrics.helper_processes.get(), 0);
    assert_eq!(
        bench.ask_of(&pool, "n1").unwrap_err(),
        "HELPER was killed because the provisioner stops"
    );
}

#[test]
fn stopping_kills_those_that_do_not_end_with_all_they_started() {
    for (wait, aborted) in [(SHORT, false), (LONG, true)] {
        let watch = Watch::new();
        let after = "trap '' TERM HUP; sleep 1000 & wait; wait";
        let script = format!(
            "exec 9>{}; while read -r line; do {PARSE}; {ANSWER}; done; {after}",
            watch.fifo()
        );
        let bench = Bench::of(&script);
        let pool = bench.pool();
        assert_eq!(bench.ask_of(&pool, "n1").unwrap(), "n1");
        let (sender, abort) = crossbeam_channel::bounded(0);
        let sender = Some(sender).filter(|_| !aborted);
        pool.stop(wait, &abort);
        drop(sender);
        watch.all_ended();
        assert_eq!(bench.metrics.helper_processes.get(), 0);
    }
}

#[test]
fn dropping_a_pool_leaves_no_process() {
    let watch = Watch::new();
    let bench = Bench::new(1, &format!("exec 9>{}", watch.fifo()), ANSWER);
    let pool = bench.pool();
    assert_eq!(bench.ask_of(&pool, "n1").unwrap(), "n1");
    drop(pool);
    watch.all_ended();
}

#[test]
fn a_replaced_pool_answers_those_who_began_with_it_and_keeps_no_process() {
    let (watch, directory) = (Watch::new(), Directory::new());
    let held = directory.path("held");
    let first = format!("[ -e {held} ] || {{ touch {held}; exec 9>{}; }}", watch.fifo());
    let old = Bench::new(1, &first, &ANSWER.replace("$identity", "old"));
    let new = Bench::new(1, "", &ANSWER.replace("$identity", "new"));
    let old_pool = old.pool();
    assert_eq!(old.ask_of(&old_pool, "n1").unwrap(), "old");
    let new_pool = old_pool.replaced(new.command(), 1);
    // The one that was asked nothing.
    watch.all_ended();
    assert_eq!(new.ask_of(&new_pool, "n2").unwrap(), "new");
    // Whoever began before goes on so.
    assert_eq!(old.ask_of(&old_pool, "n3").unwrap(), "old");
    assert_eq!(new.ask_of(&new_pool, "n4").unwrap(), "new");
    // Waits for those of the old one as well.
    new_pool.stop(LONG, &new.abort);
    assert_eq!(old.counts(), (0, 0));
}

#[test]
fn only_so_many_processes_that_do_not_end_are_waited_for() {
    let script = format!("while read -r line; do {PARSE}; {ANSWER}; done; sleep 1000");
    let bench = Bench::of(&script);
    let mut pool = bench.pool();
    for _ in 0..=THREADS_MAX {
        assert_eq!(bench.ask_of(&pool, "n1").unwrap(), "n1");
        pool = pool.replaced(bench.command(), 1);
        assert!(pool.farewell.threads_len() <= THREADS_MAX);
    }
    let (sender, abort) = crossbeam_channel::bounded(0);
    drop(sender);
    pool.stop(LONG, &abort);
    assert_eq!(bench.metrics.helper_processes.get(), 0);
}

#[test]
fn a_request_that_runs_when_its_pool_is_replaced_is_answered() {
    let directory = Directory::new();
    let (began, go) = (directory.fifo("began"), directory.fifo("go"));
    let watch = Watch::new();
    let bench = Bench::new(
        1,
        &format!("exec 9>{}", watch.fifo()),
        &format!("echo x >{began}; read x <{go}; {ANSWER}"),
    );
    let pool = bench.pool();
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| bench.ask_of(&pool, "n1"));
        assert_eq!(std::fs::read_to_string(began).unwrap(), "x\n");
        let replaced = pool.replaced(bench.command(), 1);
        std::fs::write(go, "y\n").unwrap();
        assert_eq!(asking.join().unwrap().unwrap(), "n1");
        // Waits for it, though it belongs to the other.
        replaced.stop(LONG, &bench.abort);
    });
    assert_eq!(bench.metrics.helper_processes.get(), 0);
    watch.all_ended();
}

#[test]
fn a_place_rests_longer_each_time_until_a_process_has_answered() {
    let mut now = Instant::now();
    let mut places = Places::<u32>::new(1);
    let mut rests = Vec::new();
    let Next::Take(Claim::Vacant { rest, again: false }) = places.next(now) else {
        panic!("{places:?}")
    };
    places.lose(now, rest);
    for _ in 0..10 {
        let until = places.resting[0].until;
        rests.push((until - now).as_millis());
        assert!(!matches!(places.next(until - Duration::from_millis(1)), Next::Take(_)));
        now = until;
        let Next::Take(Claim::Vacant { rest, again: true }) = places.next(now) else {
            panic!("{places:?}")
        };
        places.lose(now, rest);
    }
    assert_eq!(rests, [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000]);
    // One that has answered is as good as new.
    now = places.resting[0].until;
    assert!(matches!(places.next(now), Next::Take(Claim::Vacant { .. })));
    assert_eq!(places.give_back(7), None);
    assert!(matches!(places.next(now), Next::Take(Claim::Idle(7))));
    places.lose(now, REST_MIN);
    assert_eq!(places.resting[0].until - now, REST_MIN);
}

#[test]
fn a_request_waits_for_what_may_come_soon_and_gives_up_otherwise() {
    let now = Instant::now();
    let mut places = Places::<u32>::new(2);
    let take = |places: &mut Places<u32>| {
        assert!(matches!(places.next(now), Next::Take(_)), "{places:?}");
    };
    take(&mut places);
    take(&mut places);
    // Both are busy.
    assert!(matches!(places.next(now), Next::Wait(None)));
    places.lose(now, REST_WAIT * 2);
    // The other one may be given back at any time.
    assert!(matches!(places.next(now), Next::Wait(Some(until)) if until == now + REST_WAIT * 2));
    places.lose(now, REST_WAIT * 3);
    assert!(matches!(places.next(now), Next::Resting(time) if time == REST_WAIT * 2));
    assert!(matches!(places.next(now + REST_WAIT), Next::Wait(Some(_))));
    places.close();
    assert!(matches!(places.next(now), Next::Closed));
}

#[test]
fn the_process_that_has_waited_longest_is_next() {
    let now = Instant::now();
    let mut places = Places::<u32>::new(3);
    for _ in 1..=3 {
        assert!(matches!(places.next(now), Next::Take(Claim::Vacant { .. })));
    }
    for process in 1..=3 {
        assert_eq!(places.give_back(process), None);
    }
    for expected in [1, 2, 3, 1, 2] {
        match places.next(now) {
            Next::Take(Claim::Idle(process)) => {
                assert_eq!(process, expected);
                places.give_back(process);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(places.close(), [3, 1, 2]);
    assert_eq!(places.busy, 0);
}

/// Sets `id` and `identity` from `line`.
const PARSE: &str = r#"id=${line#*'"id":"'}; id=${id%%\"*}; identity=${line#*'"identity":"'}; identity=${identity%%\"*}"#;

/// Answers with the node's name.
const ANSWER: &str = r#"printf '{"id":"%s","reply":{"msg":"%s"}}\n' "$id" "$identity""#;

const EXEC_STYLE: &str = "HELPER wrote an answer in the style of helper_mode exec: with persistent it must be \
        {\"id\":\"...\",\"reply\":{...}}, with the id of the request";

/// Everything a pool needs.
struct Bench {
    script: String,
    processes_max: usize,
    timeout: Duration,
    output_max: usize,
    abort: Receiver<Never>,
    metrics: Arc<Metrics>,
    kept: Mutex<Option<Arc<Pool>>>,
}

impl Bench {
    /// A helper that runs `start` once, and `answer` for each line with `id` and `identity` set.
    fn new(processes_max: usize, start: &str, answer: &str) -> Bench {
        let start = if start.is_empty() { ":" } else { start };
        let script = format!("{start}; while IFS= read -r line; do {PARSE}; {answer}; done");
        Bench { processes_max, ..Bench::of(&script) }
    }

    fn of(script: &str) -> Bench {
        Bench {
            script: script.to_owned(),
            processes_max: 1,
            timeout: LONG,
            output_max: 4 << 20,
            abort: crossbeam_channel::never(),
            metrics: Metrics::new(""),
            kept: Mutex::new(None),
        }
    }

    fn command(&self) -> HelperCommand {
        HelperCommand::parse(&shell_words::join(["sh", "-c", &self.script])).unwrap()
    }

    fn pool(&self) -> Pool {
        Pool::new(self.command(), self.processes_max, Vec::new(), self.metrics.clone())
    }

    fn put(&self, pool: &Pool, input: &Input<'_>) -> Asked {
        let limits = Limits { timeout: self.timeout, output_max: self.output_max };
        pool.ask(input, limits, Instant::now() + LONG, &self.abort)
    }

    /// The `msg` of the answer, or the error's text with placeholders for what differs between runs.
    fn ask_of(&self, pool: &Pool, node: &str) -> Result<String, String> {
        let identity = Identity::parse(node).unwrap();
        let asked = self.put(pool, &input(&identity, ""));
        asked.result.map(|answer| answer.msg).map_err(|(failure, run)| {
            let error = super::super::Error { helper: "HELPER".to_owned(), failure, run };
            let took = regex::Regex::new(r"ran \d+\.\d{3} s").unwrap();
            took.replace(&error.to_string(), "ran T s").into_owned()
        })
    }

    /// Asks a pool that lasts as long as the bench.
    #[track_caller]
    fn says(&self, node: &str) {
        let pool = self.kept.lock().get_or_insert_with(|| Arc::new(self.pool())).clone();
        assert_eq!(self.ask_of(&pool, node).as_deref(), Ok(node));
    }

    /// Processes that run, and how many were started again.
    fn counts(&self) -> (i64, u64) {
        (self.metrics.helper_processes.get(), self.metrics.helper_restarts.get())
    }
}
