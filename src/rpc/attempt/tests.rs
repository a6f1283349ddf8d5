//! Answers of nodes, in any order and number, over a network in memory.

use std::thread;

use serde_json::{Value, json};

use super::*;
use crate::gate::Reason;
use crate::rpc::actions::{
    Configure, Gen25519, GenCsr, Inventory, Jwt, JwtReply, ReleaseUpdate, Restart, Shutdown,
};
use crate::rpc::testing::{
    Asked, NODE, Net, good_body, payload, recorded_answers, refusal, tampered,
};

/// Time-outs of some milliseconds; a node that answers does so before its request has left.
const FAST: Timing = Timing {
    silence: Duration::from_millis(5),
    grace: |_| Duration::from_millis(10),
    timeout: |_, _| Duration::from_millis(20),
    pause: |pause| pause / 1000,
};

struct Bench {
    net: Net,
    node: Identity,
    gate: Arc<Gate>,
    abort: Option<Channel<Never>>,
    aborted: Receiver<Never>,
}

impl Bench {
    fn new() -> Bench {
        let gate = Arc::new(Gate::new());
        gate.open(Reason::Disconnected);
        let (abort, aborted) = bounded(0);
        let node = Identity::parse(NODE).unwrap();
        Bench { net: Net::new(), node, gate, abort: Some(abort), aborted }
    }

    fn attempt<'a>(&'a self, patience: &'a mut Calm) -> Attempt<'a> {
        let deadline = Instant::now() + Duration::from_secs(600);
        let term = self.gate.begin().unwrap();
        let mut attempt = Attempt::new(
            &self.net.rpc,
            &self.node,
            &self.gate,
            term,
            &self.aborted,
            deadline,
            Duration::from_secs(2),
            patience,
        );
        attempt.timing = FAST;
        attempt.random = fastrand::Rng::with_seed(1);
        attempt
    }
}

/// A patience that counts.
struct Calm {
    rested: u32,
    silent: u32,
    answered: u32,
    agrees: bool,
    /// Goes when the node answers: the process aborts while it waits for a permit.
    abort: Option<Channel<Never>>,
    give_up: Option<Channel<Never>>,
    given_up: Receiver<Never>,
}

impl Calm {
    fn new() -> Calm {
        let (give_up, given_up) = bounded(0);
        Calm {
            rested: 0,
            silent: 0,
            answered: 0,
            agrees: true,
            abort: None,
            give_up: Some(give_up),
            given_up,
        }
    }
}

impl Patience for Calm {
    fn resting(&mut self) {
        self.rested += 1;
    }

    fn silent(&mut self) {
        self.silent += 1;
    }

    fn answered(&mut self) -> bool {
        self.answered += 1;
        self.abort = None;
        self.agrees
    }

    fn given_up(&self) -> &Receiver<Never> {
        &self.given_up
    }
}

/// Calls `action` and throws the reply away.
fn call(attempt: &mut Attempt<'_>, action: Action) -> Result<(), Error> {
    let none = std::collections::BTreeMap::new();
    match action {
        Action::Inventory => plain(attempt, Inventory {}),
        Action::Jwt => plain(attempt, Jwt { token: "s3cret" }),
        Action::Gen25519 => plain(attempt, Gen25519 { nonce: "abc", token: "s3cret" }),
        Action::GenCsr => plain(attempt, GenCsr { cn: NODE, token: "s3cret" }),
        Action::ReleaseUpdate => {
            plain(attempt, ReleaseUpdate { repository: "", token: "s3cret", version: "1" })
        }
        Action::Configure => plain(
            attempt,
            Configure {
                action_policies: &none,
                ca: "",
                certificate: "",
                config: "{}",
                ecdh_public: "",
                key: "",
                opa_policies: &none,
                server_jwt: "",
                ssldir: "",
                token: "s3cret",
            },
        ),
        Action::Restart => plain(attempt, Restart { splay_secs: 1, token: "s3cret" }),
        Action::Shutdown => plain(attempt, Shutdown { token: "s3cret" }),
    }
}

fn plain<C: Call + Copy>(attempt: &mut Attempt<'_>, request: C) -> Result<(), Error> {
    attempt.call(&mut |_| request, &mut |_, _| Checked::Done(()))
}

fn jwt(attempt: &mut Attempt<'_>) -> Result<JwtReply, Error> {
    attempt.call(&mut |_| Jwt { token: "s3cret" }, &mut |_, reply| Checked::Done(reply))
}

/// The body of a `jwt` reply with this token.
fn jwt_body(token: &str) -> String {
    let data = json!({"jwt": token, "ecdh_public": ""});
    json!({"action": "jwt", "statuscode": 0, "statusmsg": "OK", "data": data}).to_string()
}

fn tries_of(action: Action) -> u32 {
    match action {
        Action::Inventory | Action::Gen25519 | Action::Configure => 5,
        Action::Jwt | Action::Restart | Action::Shutdown => 3,
        Action::GenCsr | Action::ReleaseUpdate => 1,
    }
}

#[test]
fn returns_the_reply_of_a_node_that_agrees() {
    for action in Action::ALL {
        let bench = Bench::new();
        bench.net.answer(move |_, asked| vec![asked.reply(&good_body(action))]);
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        assert_eq!(call(&mut attempt, action), Ok(()), "{action}");
        assert_eq!(attempt.contradicted(), None);
        assert_eq!(bench.net.rpc.pending(), 1, "the id stays known until the attempt ends");
        drop(attempt);
        assert_eq!(bench.net.rpc.pending(), 0);
        assert_eq!(calm.silent, 0);
        let asked = bench.net.asked();
        let body: Value = serde_json::from_str(&asked[0].body).unwrap();
        assert_eq!(body["agent"], action.agent());
        assert_eq!(body["action"], action.name());
        assert_eq!(asked.len(), 1);
    }
}

/// Every request for `action` is answered by `answer`; checks the error and the number of requests.
#[track_caller]
fn check_failure(
    action: Action,
    tries: u32,
    answer: impl FnMut(u32, &Asked) -> Vec<crate::transport::Message> + Send + 'static,
    is_expected: impl Fn(&Error) -> bool,
) {
    let bench = Bench::new();
    bench.net.answer(answer);
    let mut calm = Calm::new();
    let error = call(&mut bench.attempt(&mut calm), action).unwrap_err();
    assert!(is_expected(&error), "{action}: {error:?}");
    assert_eq!(error.tries(), tries, "{action}: {error:?}");
    let ids: std::collections::BTreeSet<String> = bench.net.asked().iter().map(Asked::id).collect();
    assert_eq!(ids.len(), usize::try_from(tries).unwrap(), "{action}: each try has its own id");
    let labels = format!(r#"{{rpc="{action}",site="testing"}}"#);
    let series = |name: &str| {
        bench.net.series(&format!("choria_provisioner_{name}{labels}")).unwrap_or_default()
    };
    assert_eq!(series("rpc_errors"), "1");
    assert_eq!(series("rpc_time_count"), tries.to_string());
}

#[test]
fn silence_costs_the_tries_of_the_action() {
    for action in Action::ALL {
        let tries = tries_of(action);
        check_failure(action, tries, |_, _| vec![], |error| *error == Error::Silent { tries });
    }
}

#[test]
fn refusals_that_stay_are_not_tried_again() {
    type Question = fn(&Error) -> bool;
    let rows: [(&str, Question); 4] = [
        ("Could not obtain provisioning lock", Error::is_busy),
        ("Incorrect provision token supplied", Error::is_wrong_token),
        (
            "Cannot reconfigure a server that is not in provisioning mode",
            Error::is_not_provisioning,
        ),
        ("Cannot update a server that is not in provisioning mode", Error::is_not_provisioning),
    ];
    for action in Action::ALL {
        for (words, question) in rows {
            let answer = move |_, asked: &Asked| vec![asked.reply(&refusal(action, 1, words))];
            check_failure(action, 1, answer, question);
            // The same words with another status, or more words, are something else.
            let bench = Bench::new();
            bench.net.answer(move |_, asked| vec![asked.reply(&refusal(action, 5, words))]);
            let mut calm = Calm::new();
            let error = call(&mut bench.attempt(&mut calm), action).unwrap_err();
            assert!(!question(&error), "{error:?}");
        }
    }
}

#[test]
fn unknown_actions_and_unreadable_data_are_not_tried_again() {
    for action in Action::ALL {
        for code in [2, 4] {
            let answer = move |_, asked: &Asked| vec![asked.reply(&refusal(action, code, "x"))];
            check_failure(
                action,
                1,
                answer,
                |error| matches!(error, Error::Refused { code: c, .. } if *c == code),
            );
        }
    }
}

#[test]
fn other_refusals_cost_the_tries_of_the_action() {
    for action in Action::ALL {
        // A node may decline a wish to shut down.
        let tries = if action == Action::Shutdown { 1 } else { tries_of(action) };
        for code in [1, 3, 5, 6, 255] {
            let answer = move |_, asked: &Asked| vec![asked.reply(&refusal(action, code, "x"))];
            check_failure(action, tries, answer, |error| {
                *error == Error::Refused { code, message: "x".to_owned(), tries }
            });
        }
    }
}

#[test]
fn recorded_refusals_are_understood() {
    for answer in recorded_answers() {
        if answer["statuscode"] == json!(0) {
            continue;
        }
        let bench = Bench::new();
        let body = answer.to_string();
        bench.net.answer(move |_, asked| vec![asked.reply(&body)]);
        let mut calm = Calm::new();
        let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
        let Error::Refused { code, message, .. } = &error else { panic!("{error:?}") };
        assert_eq!(u64::from(*code), answer["statuscode"].as_u64().unwrap());
        assert_eq!(message, answer["statusmsg"].as_str().unwrap());
    }
}

#[test]
fn shortens_what_a_node_says_about_a_refusal() {
    let bench = Bench::new();
    bench.net.answer(|_, asked| {
        vec![asked.reply(&refusal(Action::GenCsr, 1, &format!("a\nb{}", "x".repeat(100_000))))]
    });
    let mut calm = Calm::new();
    let error = call(&mut bench.attempt(&mut calm), Action::GenCsr).unwrap_err();
    let Error::Refused { message, .. } = error else { panic!("{error:?}") };
    assert!(message.starts_with("a\\nbx") && message.len() < 600, "{message}");
}

#[test]
fn unusable_answers_cost_the_tries_of_the_action() {
    for action in Action::ALL {
        for body in ["", "pong", "{}", "null", r#"{"action":"x","statuscode":0}"#] {
            check_failure(
                action,
                tries_of(action),
                move |_, asked| vec![asked.reply(body)],
                |error| matches!(error, Error::BadReply { .. }),
            );
        }
        // Well-formed, and to something else.
        let other = if action == Action::Jwt { Action::Restart } else { Action::Jwt };
        check_failure(
            action,
            tries_of(action),
            move |_, asked| vec![asked.reply(&good_body(other))],
            |error| matches!(error, Error::BadReply { .. }),
        );
    }
}

#[test]
fn nobody_listening_is_tried_once_more() {
    for action in Action::ALL {
        check_failure(
            action,
            2,
            |_, asked| vec![asked.no_responders()],
            |error| *error == Error::Unreachable { tries: 2 },
        );
    }
}

#[test]
fn a_node_that_was_away_for_a_moment_is_reached() {
    let bench = Bench::new();
    bench.net.answer(|n, asked| match n {
        1 => vec![asked.no_responders()],
        _ => vec![asked.reply(&jwt_body("a"))],
    });
    let mut calm = Calm::new();
    assert_eq!(jwt(&mut bench.attempt(&mut calm)).unwrap().jwt, "a");
}

#[test]
fn no_responders_after_an_answer_is_a_lie() {
    let bench = Bench::new();
    bench.net.answer(|_, asked| {
        let bad = asked.reply(&refusal(Action::Jwt, 5, "x"));
        vec![bad, asked.no_responders()]
    });
    let mut calm = Calm::new();
    let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
    assert!(matches!(error, Error::Refused { tries: 3, .. }), "{error:?}");
}

#[test]
fn a_check_may_ask_once_more() {
    let bench = Bench::new();
    bench.net.answer(|n, asked| vec![asked.reply(&jwt_body(&n.to_string()))]);
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    let result: Result<Result<(), String>, Error> =
        attempt.call(&mut |_| Jwt { token: "" }, &mut |_, reply| Checked::OnceMore(Err(reply.jwt)));
    assert_eq!(result, Ok(Err("2".to_owned())), "the second word is the last");
    let result: Result<Result<(), String>, Error> =
        attempt.call(&mut |_| Jwt { token: "" }, &mut |_, reply| match reply.jwt.as_str() {
            "3" => Checked::OnceMore(Err(reply.jwt)),
            _ => Checked::Done(Ok(())),
        });
    assert_eq!(result, Ok(Ok(())));
    assert_eq!(bench.net.asked().len(), 4);
}

#[test]
fn every_try_makes_its_own_request() {
    let bench = Bench::new();
    bench.net.answer(|n, asked| match n {
        3 => vec![asked.reply(&good_body(Action::Gen25519))],
        _ => vec![asked.reply("x")],
    });
    let mut calm = Calm::new();
    let nonces = ["", "one", "two", "three"];
    let nonce = bench.attempt(&mut calm).call(
        &mut |n| Gen25519 { nonce: nonces[usize::try_from(n).unwrap()], token: "" },
        &mut |request, _| Checked::Done(request.nonce),
    );
    assert_eq!(nonce, Ok("three"));
    let asked = bench.net.asked();
    let sent: Vec<Value> =
        asked.iter().map(|asked| serde_json::from_str(&asked.body).unwrap()).collect();
    assert_eq!(sent[0]["data"]["nonce"], "one");
    assert_eq!(sent[2]["data"]["nonce"], "three");
}

#[test]
fn forged_answers_are_counted_and_the_real_one_still_counts() {
    let bench = Bench::new();
    bench.net.answer(|_, asked| {
        let forged = jwt_body("forged");
        let id = asked.id();
        let other = id.replace(|c: char| c.is_ascii_digit(), "a");
        vec![
            asked.reply_from("n1.fleet.example.net", &id, &forged),
            asked.reply_from(NODE, &other, &forged),
            asked.raw(tampered(NODE, &id, &forged)),
            asked.raw(b"x".to_vec()),
            asked.raw(Vec::new()),
            asked.reply(&jwt_body("real")),
        ]
    });
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    assert_eq!(jwt(&mut attempt).unwrap().jwt, "real");
    assert_eq!(attempt.contradicted(), None);
    for (kind, count) in [("other_sender", 1), ("other_request", 1), ("hash", 1), ("malformed", 2)]
    {
        assert_eq!(bench.net.unexpected(kind), count, "{kind}");
    }
}

#[test]
fn forged_answers_alone_are_silence() {
    check_failure(
        Action::Jwt,
        3,
        |_, asked| vec![asked.reply_from("n1.fleet.example.net", &asked.id(), &jwt_body("forged"))],
        |error| *error == Error::Silent { tries: 3 },
    );
}

/// One request is answered by two bodies; whether the attempt counts as contradicted.
fn contradicts(first: &Value, second: &Value) -> bool {
    let bench = Bench::new();
    let (first, second) = (first.to_string(), second.to_string());
    bench.net.answer(move |n, asked| match n {
        1 => vec![asked.reply(&first), asked.reply(&second)],
        _ => vec![asked.reply(&jwt_body("a"))],
    });
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    let _ = jwt(&mut attempt);
    attempt.contradicted() == Some(&Contradiction::Differs { action: Action::Jwt })
}

#[test]
fn answers_contradict_by_action_status_or_data() {
    let good: Value = serde_json::from_str(&jwt_body("a")).unwrap();
    let with = |key: &str, value: Value| {
        let mut body = good.clone();
        body[key] = value;
        body
    };
    assert!(!contradicts(&good, &good));
    assert!(!contradicts(&good, &with("statusmsg", json!("other words"))));
    assert!(contradicts(&good, &with("action", json!("restart"))));
    assert!(contradicts(&good, &with("statuscode", json!(1))));
    assert!(contradicts(&good, &with("data", json!({"jwt": "b", "ecdh_public": ""}))));
    assert!(contradicts(&good, &json!("no RPC reply")));
    assert!(contradicts(&with("statuscode", json!(1)), &good));
    assert!(contradicts(&json!("no RPC reply"), &good));
    assert!(contradicts(&json!("no RPC reply"), &json!("another")));
    assert!(!contradicts(&json!("no RPC reply"), &json!("no RPC reply")));
}

#[test]
fn counts_an_equal_answer_and_ignores_it() {
    let bench = Bench::new();
    bench.net.answer(|_, asked| vec![asked.reply(&jwt_body("a")), asked.reply(&jwt_body("a"))]);
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    assert!(jwt(&mut attempt).is_ok());
    assert_eq!(attempt.contradicted(), None);
    assert_eq!(bench.net.unexpected("duplicate"), 1);
}

#[test]
fn a_contradiction_stops_further_calls_until_configure_was_sent() {
    let bench = Bench::new();
    bench.net.answer(|_, asked| {
        let body: Value = serde_json::from_str(&asked.body).unwrap();
        let action = body["action"].as_str().unwrap().to_owned();
        let action = Action::ALL.into_iter().find(|a| a.name() == action).unwrap();
        let mut answers = vec![asked.reply(&good_body(action))];
        if action != Action::Jwt {
            answers.push(asked.reply("something else"));
        }
        answers
    });
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    assert_eq!(call(&mut attempt, Action::Configure), Ok(()));
    assert!(attempt.contradicted().is_some());
    assert_eq!(call(&mut attempt, Action::Restart), Ok(()), "it is owed its restart");
    drop(attempt);

    let mut attempt = bench.attempt(&mut calm);
    assert_eq!(call(&mut attempt, Action::Jwt), Ok(()));
    assert_eq!(call(&mut attempt, Action::GenCsr), Ok(()));
    let sent = bench.net.asked().len();
    let differs = Contradiction::Differs { action: Action::GenCsr };
    let error = call(&mut attempt, Action::Configure).unwrap_err();
    assert_eq!(error, Error::Contradicted(differs));
    assert_eq!(bench.net.asked().len(), sent);
}

#[test]
fn a_flood_is_a_contradiction() {
    let bench = Bench::new();
    bench.net.answer(|_, asked| vec![asked.reply(&jwt_body("a")); 50]);
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    assert!(jwt(&mut attempt).is_ok());
    assert_eq!(attempt.contradicted(), Some(&Contradiction::Flood { action: Action::Jwt }));
    assert_eq!(bench.net.unexpected("overflow"), 42);
}

#[test]
fn hears_a_second_answer_that_comes_later() {
    let bench = Bench::new();
    bench.net.answer(|_, asked| vec![asked.reply(&jwt_body("a"))]);
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    assert!(jwt(&mut attempt).is_ok());
    assert_eq!(attempt.listen(Duration::from_millis(1)), Ok(()));
    assert_eq!(attempt.contradicted(), None);
    bench.net.memory.deliver_message(bench.net.asked()[0].reply(&jwt_body("b")));
    assert_eq!(attempt.listen(Duration::from_millis(1)), Ok(()));
    assert_eq!(attempt.contradicted(), Some(&Contradiction::Differs { action: Action::Jwt }));
}

/// Answers nothing at first; at the second request, answers it and the first in the order that `answer` says.
fn answer_late(
    net: &Net,
    answer: impl Fn(&Asked, &Asked) -> Vec<crate::transport::Message> + Send + 'static,
) {
    let mut first: Option<Asked> = None;
    net.answer(move |_, asked| match &first {
        None => {
            first = Some(asked.clone());
            vec![]
        }
        Some(first) => answer(first, asked),
    });
}

#[test]
fn a_late_answer_counts_for_actions_that_replace_no_keys() {
    for action in [Action::Inventory, Action::Configure, Action::Restart, Action::Shutdown] {
        let bench = Bench::new();
        answer_late(&bench.net, move |first, _| vec![first.reply(&good_body(action))]);
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        assert_eq!(call(&mut attempt, action), Ok(()), "{action}");
        assert_eq!(bench.net.asked().len(), 2);
        assert_eq!(attempt.contradicted(), None);
    }
}

#[test]
fn a_late_answer_is_checked_against_its_own_request() {
    let bench = Bench::new();
    answer_late(&bench.net, |first, _| vec![first.reply(&good_body(Action::Restart))]);
    let mut calm = Calm::new();
    let splay = bench
        .attempt(&mut calm)
        .call(&mut |n| Restart { splay_secs: n, token: "" }, &mut |request, _| {
            Checked::Done(request.splay_secs)
        });
    assert_eq!(splay, Ok(1));
}

#[test]
fn only_the_last_answer_counts_for_actions_that_replace_keys() {
    for action in [Action::Jwt, Action::Gen25519] {
        let bench = Bench::new();
        answer_late(&bench.net, move |first, second| {
            vec![first.reply(&good_body(action)), second.reply(&good_body(action))]
        });
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        assert_eq!(call(&mut attempt, action), Ok(()), "{action}");
        assert_eq!(attempt.contradicted(), None, "answered in order");
        assert_eq!(bench.net.unexpected("late"), 1);
    }
    let bench = Bench::new();
    answer_late(&bench.net, |first, _| vec![first.reply(&jwt_body("old"))]);
    let mut calm = Calm::new();
    let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
    assert_eq!(error, Error::Silent { tries: 3 });
}

#[test]
fn an_earlier_try_answered_after_the_last_fails_the_attempt() {
    for action in [Action::Jwt, Action::Gen25519] {
        let bench = Bench::new();
        answer_late(&bench.net, move |first, second| {
            vec![second.reply(&good_body(action)), first.reply(&good_body(action))]
        });
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        assert_eq!(call(&mut attempt, action), Ok(()), "{action}");
        assert_eq!(attempt.contradicted(), Some(&Contradiction::KeysReplaced { action }));
    }
    // The node makes one key for each request it hears, and hears the first one last.
    let bench = Bench::new();
    answer_late(&bench.net, |first, second| {
        if first.body.contains("gencsr") {
            vec![second.reply(&good_body(Action::GenCsr)), first.reply(&good_body(Action::GenCsr))]
        } else {
            vec![]
        }
    });
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    assert!(call(&mut attempt, Action::GenCsr).is_err(), "one try only");
    assert!(call(&mut attempt, Action::GenCsr).is_ok());
    assert_eq!(attempt.contradicted(), None, "two calls, not two tries");
}

#[test]
fn a_late_refusal_that_stays_ends_the_call() {
    let bench = Bench::new();
    answer_late(&bench.net, |first, _| {
        let words = "Could not obtain provisioning lock";
        vec![first.reply(&refusal(Action::Configure, 1, words))]
    });
    let mut calm = Calm::new();
    let error = call(&mut bench.attempt(&mut calm), Action::Configure).unwrap_err();
    assert!(error.is_busy(), "{error:?}");
    assert_eq!(bench.net.asked().len(), 2);
}

#[test]
fn a_late_refusal_that_may_pass_changes_nothing() {
    let bench = Bench::new();
    answer_late(&bench.net, |first, second| {
        let refused = first.reply(&refusal(Action::Configure, 5, "x"));
        vec![refused, second.reply(&good_body(Action::Configure))]
    });
    let mut calm = Calm::new();
    assert_eq!(call(&mut bench.attempt(&mut calm), Action::Configure), Ok(()));
    assert_eq!(bench.net.asked().len(), 2);
}

#[test]
fn an_answer_that_comes_in_the_pause_counts() {
    for action in [Action::Jwt, Action::Restart] {
        let bench = Bench::new();
        let (sent, asked) = bounded(1);
        bench.net.answer(move |_, asked| {
            sent.send(asked.clone()).unwrap();
            vec![]
        });
        let memory = bench.net.memory.clone();
        let node = thread::spawn(move || {
            let asked: Asked = asked.recv().unwrap();
            memory.deliver_message(asked.reply(&good_body(action)));
        });
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        attempt.timing.timeout = |_, _| Duration::ZERO;
        attempt.timing.pause = |_| Duration::from_secs(60);
        assert_eq!(call(&mut attempt, action), Ok(()));
        assert_eq!(bench.net.asked().len(), 1);
        node.join().unwrap();
    }
}

#[test]
fn a_silent_node_gives_its_permit_back_until_it_answers() {
    let bench = Bench::new();
    bench.net.answer(|n, asked| match n {
        1 | 2 => vec![],
        _ => vec![asked.reply(&jwt_body("a"))],
    });
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    assert!(jwt(&mut attempt).is_ok());
    assert!(jwt(&mut attempt).is_ok());
    drop(attempt);
    assert_eq!((calm.rested, calm.silent, calm.answered), (1, 1, 1));
}

#[test]
fn a_node_to_be_asked_again_leaves_its_permit_to_others_meanwhile() {
    let bench = Bench::new();
    bench.net.answer(|n, asked| match n {
        1 => vec![asked.reply(r#"{"action":"jwt","statuscode":1,"statusmsg":"no","data":{}}"#)],
        _ => vec![asked.reply(&jwt_body("a"))],
    });
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    assert!(jwt(&mut attempt).is_ok());
    drop(attempt);
    assert_eq!((calm.rested, calm.silent, calm.answered), (1, 0, 1));
}

#[test]
fn a_silent_node_without_a_permit_is_given_up() {
    let bench = Bench::new();
    bench.net.answer(|n, asked| match n {
        1 => vec![],
        _ => vec![asked.reply(&jwt_body("a"))],
    });
    let mut calm = Calm::new();
    calm.agrees = false;
    let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
    assert_eq!(error, Error::GivenUp { tries: 2 });

    let mut calm = Calm::new();
    calm.give_up = None;
    let error = call(&mut bench.attempt(&mut calm), Action::Restart).unwrap_err();
    assert!(matches!(error, Error::GivenUp { tries: 1 }), "{error:?}");
}

#[test]
fn an_abort_while_a_node_waits_for_its_permit_is_called_one() {
    let mut bench = Bench::new();
    bench.net.answer(|n, asked| match n {
        1 => vec![],
        _ => vec![asked.reply(&jwt_body("a"))],
    });
    let mut calm = Calm::new();
    (calm.agrees, calm.abort) = (false, bench.abort.take());
    let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
    assert_eq!(error, Error::Stopped(Closed::Aborted));
}

#[test]
fn an_abort_wins_against_answers() {
    let mut bench = Bench::new();
    bench.net.answer(|_, asked| vec![asked.reply(&jwt_body("a"))]);
    bench.abort = None;
    let mut calm = Calm::new();
    let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
    assert_eq!(error, Error::Stopped(Closed::Aborted));
    assert_eq!(
        bench.net.series("choria_provisioner_rpc_errors{").as_deref(),
        Some(r#"rpc="choria_provision#jwt",site="testing"} 0"#)
    );
}

#[test]
fn asks_the_gate_before_every_try() {
    let bench = Bench::new();
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    bench.gate.end_term();
    let error = jwt(&mut attempt).unwrap_err();
    assert_eq!(error, Error::Stopped(Closed::TermEnded));
    assert!(bench.net.asked().is_empty());
    drop(attempt);

    // Lost between two tries.
    let bench = Arc::new(Bench::new());
    let weak = Arc::downgrade(&bench);
    bench.net.answer(move |_, asked| {
        weak.upgrade().unwrap().gate.end_term();
        vec![asked.reply("x")]
    });
    let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
    assert_eq!(error, Error::Stopped(Closed::TermEnded));
    assert_eq!(bench.net.asked().len(), 1);
}

impl Bench {
    /// Lets the connection end and come back under the first `lost` requests, which nobody answers; `answer` says
    /// what comes for the later ones, numbered from 1.
    fn lose(
        &self,
        lost: u32,
        mut answer: impl FnMut(u32, &Asked) -> Vec<crate::transport::Message> + Send + 'static,
    ) {
        let gate = self.gate.clone();
        self.net.answer(move |n, asked| {
            if n > lost {
                return answer(n - lost, asked);
            }
            gate.close(Reason::Disconnected);
            gate.open(Reason::Disconnected);
            vec![]
        });
    }
}

/// Nobody waits this long in a test.
const PATIENT: Timing = Timing { timeout: |_, _| Duration::from_secs(600), ..FAST };

#[test]
fn a_request_lost_with_the_connection_is_sent_again_and_counts_as_no_try() {
    for action in Action::ALL.into_iter().filter(|action| !action.is_sent_once()) {
        let bench = Bench::new();
        bench.lose(1, move |_, asked| vec![asked.reply(&good_body(action))]);
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        attempt.timing = PATIENT;
        assert_eq!(call(&mut attempt, action), Ok(()), "{action}");
        assert_eq!(attempt.contradicted(), None);
        assert_eq!(bench.net.asked().len(), 2);

        let bench = Bench::new();
        bench.lose(2, |_, _| vec![]);
        let error = call(&mut bench.attempt(&mut calm), action).unwrap_err();
        assert_eq!(error, Error::Silent { tries: 2 + tries_of(action) }, "{action}");
    }
}

#[test]
fn an_update_lost_with_the_connection_is_not_sent_again() {
    let bench = Bench::new();
    bench.lose(1, |_, _| vec![]);
    let mut calm = Calm::new();
    let error = call(&mut bench.attempt(&mut calm), Action::ReleaseUpdate).unwrap_err();
    assert_eq!(error, Error::Lost { tries: 1 });
    assert_eq!(bench.net.asked().len(), 1);
}

#[test]
fn a_connection_that_never_holds_ends_the_call() {
    let bench = Bench::new();
    bench.lose(u32::MAX, |_, _| vec![]);
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    attempt.timing = PATIENT;
    let error = call(&mut attempt, Action::Restart).unwrap_err();
    assert_eq!(error, Error::Lost { tries: 10 });
}

#[test]
fn an_answer_that_comes_soon_after_the_reconnect_counts() {
    for action in Action::ALL {
        let bench = Bench::new();
        let (sent, asked) = bounded(1);
        let gate = bench.gate.clone();
        bench.net.answer(move |_, asked| {
            gate.close(Reason::Disconnected);
            sent.send(asked.clone()).unwrap();
            vec![]
        });
        let (memory, gate) = (bench.net.memory.clone(), bench.gate.clone());
        let node = thread::spawn(move || {
            let asked: Asked = asked.recv().unwrap();
            gate.open(Reason::Disconnected);
            memory.deliver_message(asked.reply(&good_body(action)));
        });
        let mut calm = Calm::new();
        let mut attempt = bench.attempt(&mut calm);
        attempt.timing = Timing { grace: |_| Duration::from_secs(600), ..PATIENT };
        assert_eq!(call(&mut attempt, action), Ok(()), "{action}");
        assert_eq!(bench.net.asked().len(), 1);
        node.join().unwrap();
    }
}

#[test]
fn a_lost_request_is_not_given_up_while_there_is_no_connection() {
    let bench = Bench::new();
    let gate = bench.gate.clone();
    bench.net.answer(move |_, _| {
        gate.close(Reason::Disconnected);
        vec![]
    });
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    // Both have ended long before the node's own time.
    attempt.timing = FAST;
    attempt.deadline = Some(Instant::now() + Duration::from_millis(200));
    let error = call(&mut attempt, Action::GenCsr).unwrap_err();
    assert_eq!(error, Error::Deadline { tries: 1, last: None });
}

#[test]
fn after_a_reconnect_a_node_that_is_not_back_yet_is_asked_until_it_is() {
    let bench = Bench::new();
    bench.lose(1, |n, asked| match n {
        1..=5 => vec![asked.no_responders()],
        _ => vec![asked.reply(&good_body(Action::Configure))],
    });
    let mut calm = Calm::new();
    assert_eq!(call(&mut bench.attempt(&mut calm), Action::Configure), Ok(()));
    assert_eq!(bench.net.asked().len(), 7);

    // One that may have restarted is not waited for.
    bench.lose(1, |_, asked| vec![asked.no_responders()]);
    let error = call(&mut bench.attempt(&mut calm), Action::Restart).unwrap_err();
    assert_eq!(error, Error::Unreachable { tries: 3 });

    // A node that was found since then was back already.
    bench.net.answer(|_, asked| vec![asked.no_responders()]);
    let error = call(&mut bench.attempt(&mut calm), Action::Configure).unwrap_err();
    assert_eq!(error, Error::Unreachable { tries: 2 });
}

#[test]
fn waits_for_the_connection_within_the_nodes_time() {
    let bench = Bench::new();
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    bench.gate.close(Reason::Disconnected);
    attempt.deadline = Some(Instant::now() + Duration::from_millis(10));
    let error = jwt(&mut attempt).unwrap_err();
    assert_eq!(error, Error::Deadline { tries: 0, last: None });
    assert!(bench.net.asked().is_empty());
}

#[test]
fn the_nodes_time_ends_a_wait_and_the_last_failure_is_kept() {
    let bench = Bench::new();
    bench.net.answer(|n, asked| match n {
        1 => vec![asked.reply(&refusal(Action::Jwt, 5, "x"))],
        _ => vec![],
    });
    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    attempt.timing.timeout = |_, _| Duration::from_secs(60);
    attempt.deadline = Some(Instant::now() + Duration::from_millis(500));
    let Error::Deadline { tries, last } = jwt(&mut attempt).unwrap_err() else {
        panic!("not ended by the deadline");
    };
    assert_eq!(tries, 2);
    assert!(matches!(*last.unwrap(), Error::Refused { code: 5, tries: 1, .. }));
    let error = jwt(&mut attempt).unwrap_err();
    assert_eq!(error, Error::Deadline { tries: 0, last: None });
    assert_eq!(bench.net.asked().len(), 2, "nothing is sent after it");

    attempt.ignore_deadline();
    attempt.timing = FAST;
    let error = call(&mut attempt, Action::Restart).unwrap_err();
    assert_eq!(error, Error::Silent { tries: 3 });
}

#[test]
fn a_request_that_cannot_be_sent_is_tried_again_only_for_want_of_a_connection() {
    let bench = Bench::new();
    bench.net.memory.set_connected(false);
    let mut calm = Calm::new();
    let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
    assert_eq!(error, Error::Send(SendError(PublishError::Disconnected)));

    bench.net.memory.set_connected(true);
    bench.net.memory.set_max_payload(10);
    let error = jwt(&mut bench.attempt(&mut calm)).unwrap_err();
    assert!(matches!(error, Error::Send(SendError(PublishError::TooLarge { .. }))), "{error:?}");
}

#[test]
fn takes_over_what_the_prober_heard() {
    let bench = Bench::new();
    let (sink, heard) = bounded(1);
    let body = Inventory {}.body();
    let registration = bench.net.rpc.send(&bench.node, Action::Inventory, &body, &sink).unwrap();
    let asked = bench.net.asked().remove(0);
    bench.net.memory.deliver_message(asked.reply(&good_body(Action::Inventory)));
    bench.net.answer(|_, asked| vec![asked.reply(&jwt_body("a"))]);

    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    attempt.adopt(registration, heard.try_recv().unwrap());
    assert!(jwt(&mut attempt).is_ok());
    // A second machine with this name was slower.
    bench.net.memory.deliver_message(asked.reply("something else"));
    assert_eq!(attempt.contradicted(), None, "the first answer is not read yet");
    assert_eq!(call(&mut attempt, Action::Inventory), Ok(()));
    assert_eq!(bench.net.asked().len(), 2, "the inventory was asked for once");
    let differs = Contradiction::Differs { action: Action::Inventory };
    assert_eq!(attempt.contradicted(), Some(&differs));
}

#[test]
fn hears_of_a_second_answer_that_came_before_it_took_over() {
    let bench = Bench::new();
    let (sink, heard) = bounded(8);
    let registration = bench.net.rpc.send(&bench.node, Action::Inventory, "{}", &sink).unwrap();
    let asked = bench.net.asked().remove(0);
    bench.net.memory.deliver_message(asked.reply(&good_body(Action::Inventory)));
    bench.net.memory.deliver_message(asked.reply("something else"));

    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    attempt.adopt(registration, heard.try_recv().unwrap());
    assert_eq!(call(&mut attempt, Action::Inventory), Ok(()));
    let differs = Contradiction::Differs { action: Action::Inventory };
    assert_eq!(attempt.contradicted(), Some(&differs));
}

#[test]
fn asks_again_when_the_prober_heard_nonsense() {
    let bench = Bench::new();
    let (sink, heard) = bounded(1);
    let registration = bench.net.rpc.send(&bench.node, Action::Inventory, "{}", &sink).unwrap();
    let forged = payload("n1.fleet.example.net", registration.id().as_str(), "x");
    bench.net.memory.deliver_message(bench.net.asked()[0].raw(forged));
    bench.net.answer(|_, asked| vec![asked.reply(&good_body(Action::Inventory))]);

    let mut calm = Calm::new();
    let mut attempt = bench.attempt(&mut calm);
    attempt.adopt(registration, heard.try_recv().unwrap());
    assert_eq!(call(&mut attempt, Action::Inventory), Ok(()));
    assert_eq!(bench.net.asked().len(), 2);
    assert_eq!(bench.net.unexpected("other_sender"), 1);
}

#[test]
fn errors_say_what_happened() {
    let deadline = Error::Deadline {
        tries: 2,
        last: Some(Box::new(Error::Refused { code: 5, message: "x".to_owned(), tries: 1 })),
    };
    assert_eq!(deadline.to_string(), "the node's time was up, after 2 tries");
    let cause = std::error::Error::source(&deadline).unwrap();
    assert_eq!(cause.to_string(), "refused with status 5: x (1 try)");
    assert_eq!(Error::Silent { tries: 3 }.to_string(), "no answer, after 3 tries");
}
