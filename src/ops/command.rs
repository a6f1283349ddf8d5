//! What an operator can ask and change while the daemon runs: each command, and what it does.
//!
//! A pause is the gate's own reason, so nothing else lifts it and running nodes finish. `retry` is a sighting by an
//! operator, the only way but discovery and events by which a node is queued. A denied node is forgotten and not seen
//! until it is allowed or we end. How commands come in is `socket`'s affair.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::Sender;
use serde::{Deserialize, Serialize};

use crate::fleet::election::View;
use crate::fleet::election::core::{Role, TAKE_BACK_AFTER};
use crate::fleet::registry::{DENIED_MAX, NodeState, Sighted, Sighting, TooManyDenied};
use crate::fleet::roster::{RetriedAll, Roster};
use crate::gate::{Gate, Reason};
use crate::ops::reload::{Asking, Reloaded};
use crate::ops::status::{Known, Listed, Nodes, Query, Show, Status, past};
use crate::protocol::{self, Identity};

/// One command, as it is sent through the socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case", deny_unknown_fields)]
pub enum Command {
    /// Say what you are doing.
    Status {},
    /// List nodes.
    Nodes(Query),
    /// Say what you know of one node.
    Node {
        /// Which.
        node: String,
    },
    /// Begin nothing new.
    Pause {},
    /// Begin again.
    Resume {},
    /// Try a node now, or all that wait.
    Retry {
        /// Which; nothing with `all`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        node: Option<String>,
        /// Every node that waits.
        #[serde(default)]
        all: bool,
    },
    /// Ask the fleet who is there, now.
    Discover {},
    /// Leave a node alone.
    Deny {
        /// Which.
        node: String,
    },
    /// Take that back.
    Allow {
        /// Which.
        node: String,
    },
    /// Read the settings again.
    Reload {},
    /// Let another lead.
    StepDown {},
}

/// What came of a command.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Answer {
    /// What we are doing.
    Status(Box<Status>),
    /// Nodes.
    Nodes(Nodes),
    /// One of them.
    Node(Box<Known>),
    /// Something was done.
    Change(Change),
    /// The settings were read again.
    Reloaded(Reload),
}

/// What a command has changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Whether anything is other than before.
    pub changed: bool,
    /// What, for people.
    pub message: String,
}

/// What a reload has changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reload {
    /// Whether any setting is other than before.
    pub changed: bool,
    /// What happened, for people.
    pub message: String,
    /// The keys whose settings are other than before.
    pub settings: Vec<String>,
    /// What may not be meant as it is written.
    pub warnings: Vec<String>,
}

/// Why a command was not followed, for people; each reason on a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused(pub String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

/// Whoever follows commands.
pub trait Obey: Send + Sync {
    /// Does what `command` says. It may take as long as all nodes take to be looked at; only a reload waits, for its files.
    ///
    /// # Errors
    ///
    /// [`Refused`], and nothing has changed.
    fn obey(&self, command: Command) -> Result<Answer, Refused>;
}

/// What commands act on.
pub struct Operator {
    /// Says what we are doing.
    pub shown: Arc<dyn Show>,
    /// Is closed by a pause.
    pub gate: Arc<Gate>,
    /// What we know of the nodes.
    pub roster: Arc<Roster>,
    /// A message starts a discovery.
    pub discover: Sender<()>,
    /// Who leads, if that is decided by an election.
    pub election: Option<Arc<View>>,
    /// Has the settings read again.
    pub reload: Asking,
}

impl Obey for Operator {
    fn obey(&self, command: Command) -> Result<Answer, Refused> {
        Ok(Answer::Change(match command {
            Command::Status {} => return Ok(Answer::Status(Box::new(self.shown.status()))),
            Command::Nodes(query) => return Ok(Answer::Nodes(self.shown.nodes(&query))),
            Command::Node { node } => {
                return Ok(Answer::Node(Box::new(self.known(&parse(&node)?))));
            }
            Command::Pause {} => self.pause()?,
            Command::Resume {} => self.resume(),
            Command::Retry { node: Some(node), all: false } => self.retry(&node)?,
            Command::Retry { node: None, all: true } => self.retry_all()?,
            Command::Retry { .. } => {
                return Err(Refused("retry needs either a node or all".into()));
            }
            Command::Discover {} => self.discover()?,
            Command::Deny { node } => self.deny(&node)?,
            Command::Allow { node } => self.allow(&node)?,
            Command::StepDown {} => self.step_down()?,
            Command::Reload {} => return self.reload().map(Answer::Reloaded),
        }))
    }
}

impl Operator {
    fn known(&self, identity: &Identity) -> Known {
        let Status { workers, outcomes, closed_by, .. } = self.shown.status();
        let now = Instant::now();
        let registry = self.roster.registry();
        let mut denied = registry.denied().filter(|(node, _)| *node == identity);
        Known {
            listed: registry.node(identity).map(|node| Listed::new(&node, now)),
            worker: workers.into_iter().find(|worker| worker.node == identity.as_str()),
            last: outcomes.into_iter().find(|ended| ended.node == identity.as_str()),
            denied_secs: denied.next().map(|(_, since)| past(since, now)),
            owner: self
                .roster
                .shares()
                .other_owner(identity)
                .map(|other| other.identity.to_string()),
            closed_by: closed_by.into_iter().map(|closed| closed.text).collect(),
        }
    }

    fn pause(&self) -> Result<Change, Refused> {
        let reasons = self.gate.reasons();
        if reasons.contains(&Reason::Draining) {
            return Err(Refused(list(&[Reason::Draining])));
        }
        if reasons.contains(&Reason::Operator) {
            return Ok(nothing("It is paused already."));
        }
        self.gate.close(Reason::Operator);
        log::warn!(component = "operator"; "Paused by an operator");
        let working = self.roster.registry().counts().working;
        Ok(done(match working {
            0 => "Paused; no node is in work.".into(),
            _ => format!("Paused; {working} in work will be finished."),
        }))
    }

    fn resume(&self) -> Change {
        if !self.gate.reasons().contains(&Reason::Operator) {
            return nothing("It is not paused.");
        }
        self.gate.open(Reason::Operator);
        log::warn!(component = "operator"; "Resumed by an operator");
        let rest = self.gate.reasons();
        if rest.is_empty() {
            // A full channel holds the request already; without a receiver we are ending.
            let _ = self.discover.try_send(());
            return done("Resumed; a discovery begins.".into());
        }
        done(format!("Resumed, but nothing begins: {}.", list(&rest)))
    }

    fn retry(&self, name: &str) -> Result<Change, Refused> {
        self.may_queue()?;
        let identity = parse(name)?;
        let is_known = self.roster.registry().node(&identity).is_some();
        let change = match self.roster.sight(&identity, Sighting::Operator) {
            Sighted::Queued(_) if is_known => done(format!("{identity} is queued{}.", self.but())),
            // It may be there all the same: a node announces itself once.
            Sighted::Queued(_) => done(format!(
                "{identity} is queued{}. It was not known here, and is forgotten if nobody answers to that name.",
                self.but()
            )),
            Sighted::Known | Sighted::NotDue | Sighted::AskAgain(_) => self.why_not(&identity),
            Sighted::QueueFull => {
                return Err(Refused(format!("the queue is full, {identity} was not queued")));
            }
            Sighted::Denied => {
                return Err(Refused(format!("{identity} is denied: allow it first")));
            }
            Sighted::Others => return Err(self.whose(&identity)),
        };
        if change.changed {
            log::info!(component = "operator", node = identity.as_str(); "An operator wants {identity} tried");
        }
        Ok(change)
    }

    /// A node that another instance provisions.
    fn whose(&self, identity: &Identity) -> Refused {
        Refused(match self.roster.shares().other_owner(identity) {
            Some(protocol::Sender { identity: other, .. }) => {
                format!("{identity} belongs to {other}: give the command there")
            }
            None => format!("{identity} belonged to another instance a moment ago: try again"),
        })
    }

    /// A node that needs no retry.
    fn why_not(&self, identity: &Identity) -> Change {
        let registry = self.roster.registry();
        let state = registry.node(identity).map(|node| node.state);
        nothing(&match state {
            Some(NodeState::Queued { .. }) => format!("{identity} is queued already."),
            Some(NodeState::Working { .. }) => format!("{identity} is being worked on."),
            Some(NodeState::Settling { until }) => {
                let left = until.saturating_duration_since(Instant::now()).as_secs();
                format!("{identity} was served a moment ago and is left alone for {left} s.")
            }
            Some(NodeState::Waiting { .. }) | None => format!("{identity} is being taken."),
        })
    }

    fn retry_all(&self) -> Result<Change, Refused> {
        self.may_queue()?;
        let RetriedAll { queued, is_full } = self.roster.retry_all();
        log::info!(component = "operator", queued; "An operator wants every node tried that waits");
        Ok(match (queued, is_full) {
            (0, false) => nothing("No node waits."),
            (_, false) => done(format!("{queued} are queued{}.", self.but())),
            (_, true) => done(format!(
                "{queued} are queued{}; the queue is full, the others are taken when they are seen next.",
                self.but()
            )),
        })
    }

    /// Queues must stay empty while they are nobody's.
    fn may_queue(&self) -> Result<(), Refused> {
        let mut reasons = self.gate.reasons();
        reasons.retain(|reason| matches!(reason, Reason::Standby | Reason::Draining));
        if reasons.is_empty() { Ok(()) } else { Err(Refused(list(&reasons))) }
    }

    /// What keeps a queued node from being taken.
    fn but(&self) -> String {
        let reasons = self.gate.reasons();
        if reasons.is_empty() { String::new() } else { format!(", but {}", list(&reasons)) }
    }

    fn discover(&self) -> Result<Change, Refused> {
        if let Err(reasons) = self.gate.begin() {
            return Err(Refused(list(&reasons)));
        }
        log::info!(component = "operator"; "An operator wants a discovery");
        // A full channel holds the request already.
        Ok(match self.discover.try_send(()) {
            Ok(()) => done("A discovery begins.".into()),
            Err(_) => nothing("A discovery is about to begin."),
        })
    }

    fn deny(&self, name: &str) -> Result<Change, Refused> {
        let identity = parse(name)?;
        let (denied, is_known, is_working) = {
            let mut registry = self.roster.registry();
            let is_known = registry.node(&identity).is_some();
            let denied = registry.deny(&identity, Instant::now());
            (denied, is_known, registry.node(&identity).is_some())
        };
        self.roster.measure();
        match denied {
            Ok(true) => {
                log::warn!(component = "operator", node = identity.as_str(); "Denied by an operator: {identity}");
                let until = "until it is allowed or the daemon ends";
                Ok(done(match (is_working, is_known) {
                    (true, _) => format!(
                        "{identity} is being worked on and finished, then left alone {until}."
                    ),
                    (false, true) => format!("{identity} is left alone {until}."),
                    (false, false) => {
                        format!("{identity} is left alone {until}; it was not known here.")
                    }
                }))
            }
            Ok(false) => Ok(nothing(&format!("{identity} is denied already."))),
            Err(TooManyDenied) => {
                Err(Refused(format!("{DENIED_MAX} nodes are denied, the most there may be")))
            }
        }
    }

    fn allow(&self, name: &str) -> Result<Change, Refused> {
        let identity = parse(name)?;
        if !self.roster.registry().allow(&identity) {
            return Ok(nothing(&format!("{identity} is not denied.")));
        }
        log::warn!(component = "operator", node = identity.as_str(); "Allowed by an operator: {identity}");
        Ok(done(format!("{identity} is taken when it is seen next.")))
    }
}

impl Operator {
    fn step_down(&self) -> Result<Change, Refused> {
        let Some(election) = &self.election else {
            return Err(Refused("there is no election: leader_election is off".into()));
        };
        match election.get().role {
            Role::Leader | Role::Confirming => {}
            Role::SteppedDown => return Ok(nothing("It has stepped down already.")),
            Role::SettingUp | Role::Candidate | Role::Out => {
                return Ok(nothing("It does not lead."));
            }
        }
        log::warn!(component = "operator"; "An operator wants another to lead");
        election.step_down();
        let working = self.roster.registry().counts().working;
        let back =
            format!("If no other daemon takes over within {TAKE_BACK_AFTER:?}, it leads again.");
        Ok(done(match working {
            0 => format!("It steps down; no node is in work. {back}"),
            _ => format!("It steps down when {working} in work are finished. {back}"),
        }))
    }

    fn reload(&self) -> Result<Reload, Refused> {
        log::info!(component = "operator"; "An operator wants the settings read again");
        let Reloaded { changed, warnings } =
            self.reload.reload().map_err(|refused| Refused(refused.to_string()))?;
        let message = match changed.as_slice() {
            [] => "Reloaded; no setting is other than before.".into(),
            keys => format!("Reloaded; changed: {}.", keys.join(", ")),
        };
        Ok(Reload { changed: !changed.is_empty(), message, settings: changed, warnings })
    }
}

fn parse(name: &str) -> Result<Identity, Refused> {
    Identity::parse(name).map_err(|error| Refused(format!("{name:?}: {error}")))
}

fn list(reasons: &[Reason]) -> String {
    reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn done(message: String) -> Change {
    Change { changed: true, message }
}

fn nothing(message: &str) -> Change {
    Change { changed: false, message: message.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use crossbeam_channel::{Receiver, bounded};

    use super::*;
    use crate::fleet::election::Shown;
    use crate::fleet::registry::{Key, Limits, Next};
    use crate::fleet::roster::Queues;
    use crate::metrics::Metrics;
    use crate::node::{Outcome, Report};
    use crate::ops::reload::{NotReloaded, Outcome as Reloading};
    use crate::ops::status::testing::{self, Still};
    use crate::shutdown::Never;

    struct Bench {
        operator: Operator,
        discovers: Receiver<()>,
        queues: Queues,
        wishes: Receiver<Sender<Reloading>>,
        /// Until the daemon ends.
        over: Option<Sender<Never>>,
    }

    impl Bench {
        fn new(queue_max: usize) -> Bench {
            let limits = Limits::new(Duration::from_secs(60), Duration::from_secs(1800));
            let (roster, queues) = Roster::new(limits, queue_max, Metrics::new("test"));
            let (discover, discovers) = bounded(1);
            let gate = Arc::new(Gate::new());
            gate.open(Reason::Disconnected);
            let roster = Arc::new(roster);
            let (wish, wishes) = bounded(1);
            let (over, ending) = bounded(0);
            let reload = Asking::new(wish, ending);
            let (shown, election) = (Arc::new(Still::default()), None);
            let operator = Operator { shown, gate, roster, discover, election, reload };
            Bench { operator, discovers, queues, wishes, over: Some(over) }
        }

        /// Follows a command given as it comes through the socket.
        fn give(&self, command: &str) -> Result<Change, String> {
            let command = serde_json::from_str(command).map_err(|error| error.to_string())?;
            match self.operator.obey(command).map_err(|refused| refused.0)? {
                Answer::Change(change) => Ok(change),
                other => panic!("{other:?}"),
            }
        }

        #[track_caller]
        fn changes(&self, command: &str, message: &str) {
            assert_eq!(self.give(command), Ok(done(message.into())), "{command}");
        }

        #[track_caller]
        fn changes_nothing(&self, command: &str, message: &str) {
            assert_eq!(self.give(command), Ok(nothing(message)), "{command}");
        }

        #[track_caller]
        fn refuses(&self, command: &str, error: &str) {
            let refused = self.give(command).unwrap_err();
            assert!(refused.starts_with(error), "{command}: {refused}");
        }

        fn take(&self) -> Key {
            let queues = &self.queues;
            let key = queues.first.try_recv().or_else(|_| queues.retry.try_recv()).unwrap();
            self.operator.roster.registry().take(&key, Instant::now()).unwrap();
            key
        }

        fn finish(&self, key: &Key, outcome: Outcome) -> Next {
            let report = Report::new(outcome, "because");
            let now = Instant::now();
            let finish = |registry: &mut crate::fleet::registry::Registry,
                          push: &mut dyn FnMut(_, &Key) -> bool| {
                registry.finish(key, &report, now, false, false, push)
            };
            self.operator.roster.change(finish).next
        }

        /// A node that failed three times and waits.
        fn fail(&self, name: &str) {
            let identity = Identity::parse(name).unwrap();
            for _ in 0..3 {
                self.operator.roster.sight(&identity, Sighting::Discovery);
                let key = self.take();
                self.finish(&key, Outcome::Failed);
            }
        }
    }

    #[test]
    fn a_pause_closes_the_gate_and_only_resume_opens_it() {
        let bench = Bench::new(10);
        let gate = &bench.operator.gate;
        bench.changes_nothing(r#"{"command":"resume"}"#, "It is not paused.");
        bench.changes(r#"{"command":"pause"}"#, "Paused; no node is in work.");
        assert_eq!(gate.reasons(), [Reason::Operator]);
        bench.changes_nothing(r#"{"command":"pause"}"#, "It is paused already.");
        bench.refuses(r#"{"command":"discover"}"#, "paused by an operator");
        gate.close(Reason::Disconnected);
        bench.changes(
            r#"{"command":"resume"}"#,
            "Resumed, but nothing begins: not connected to a broker.",
        );
        assert!(bench.discovers.is_empty());
        gate.open(Reason::Disconnected);
        bench.give(r#"{"command":"pause"}"#).unwrap();
        bench.changes(r#"{"command":"resume"}"#, "Resumed; a discovery begins.");
        assert_eq!(bench.discovers.try_iter().count(), 1);
        assert!(gate.begin().is_ok());
    }

    #[test]
    fn only_a_leader_can_step_down() {
        let mut bench = Bench::new(10);
        let command = r#"{"command":"step_down"}"#;
        bench.refuses(command, "there is no election: leader_election is off");
        let (view, wishes) = View::new();
        bench.operator.election = Some(view.clone());
        bench.changes_nothing(command, "It does not lead.");
        assert!(wishes.is_empty());
        view.show(Shown::role(Role::SteppedDown));
        bench.changes_nothing(command, "It has stepped down already.");
        view.show(Shown::role(Role::Leader));
        bench.changes(
            command,
            "It steps down; no node is in work. If no other daemon takes over within 3s, it leads again.",
        );
        assert_eq!(wishes.try_iter().count(), 1);
    }

    #[test]
    fn whoever_wants_a_reload_hears_what_came_of_it() {
        let mut bench = Bench::new(10);
        let reload = |outcome| {
            thread::scope(|scope| {
                let asking = scope.spawn(|| bench.operator.obey(Command::Reload {}));
                bench.wishes.recv().unwrap().send(outcome).unwrap();
                asking.join().unwrap().map(|answer| serde_json::to_value(answer).unwrap())
            })
        };
        let reloaded = Reloaded { changed: vec!["workers".into()], warnings: vec!["w".into()] };
        assert_eq!(
            reload(Ok(reloaded)).unwrap(),
            serde_json::json!({
                "changed": true,
                "message": "Reloaded; changed: workers.",
                "settings": ["workers"],
                "warnings": ["w"],
            })
        );
        let reasons = vec!["p.yaml:1: wrong".into(), "p.yaml:2: wrong too".into()];
        assert_eq!(
            reload(Err(NotReloaded(reasons))).unwrap_err().0,
            "p.yaml:1: wrong\np.yaml:2: wrong too"
        );
        // Files that can't be read to their end must not hold up ours.
        bench.over = None;
        let refused = bench.operator.obey(Command::Reload {}).unwrap_err();
        assert_eq!(refused.0, "the daemon is shutting down");
        let refused = bench.operator.obey(Command::Reload {}).unwrap_err();
        assert_eq!(refused.0, "too many wait for a reload", "that one is there still");
    }

    #[test]
    fn a_discovery_is_asked_for_once() {
        let bench = Bench::new(10);
        bench.changes(r#"{"command":"discover"}"#, "A discovery begins.");
        bench.changes_nothing(r#"{"command":"discover"}"#, "A discovery is about to begin.");
        assert_eq!(bench.discovers.try_iter().count(), 1);
    }

    #[test]
    fn a_node_is_retried_before_its_time_and_only_when_that_helps() {
        let bench = Bench::new(2);
        let retry = r#"{"command":"retry","node":"n1.example.net"}"#;
        bench.fail("n1.example.net");
        bench.changes(retry, "n1.example.net is queued.");
        bench.changes_nothing(retry, "n1.example.net is queued already.");
        let key = bench.take();
        bench.changes_nothing(retry, "n1.example.net is being worked on.");
        let now = Instant::now();
        bench.finish(&key, Outcome::Provisioned { configured_at: now, restarted_at: Some(now) });
        let settles = bench.give(retry).unwrap();
        assert!(!settles.changed && settles.message.contains("is left alone for "), "{settles:?}");
        // One that nobody knows may be there all the same.
        bench.changes(
            r#"{"command":"retry","node":"new.example.net"}"#,
            "new.example.net is queued. It was not known here, and is forgotten if nobody answers to that name.",
        );
        bench.give(r#"{"command":"pause"}"#).unwrap();
        bench.changes(
            r#"{"command":"retry","node":"newer.example.net"}"#,
            "newer.example.net is queued, but paused by an operator. It was not known here, and is forgotten if nobody answers to that name.",
        );
        bench.refuses(r#"{"command":"retry","node":"newest.example.net"}"#, "the queue is full");
        bench.refuses(r#"{"command":"retry","node":"*"}"#, "\"*\": identity holds a wildcard");
        bench.operator.gate.end_term();
        bench.refuses(retry, "standing by");
        bench.refuses(r#"{"command":"retry","all":true}"#, "standing by");
    }

    #[test]
    fn all_that_wait_are_retried_and_no_other() {
        let bench = Bench::new(2);
        let all = r#"{"command":"retry","all":true}"#;
        bench.changes_nothing(all, "No node waits.");
        bench.fail("n1.example.net");
        bench.fail("n2.example.net");
        bench.operator.roster.sight(&Identity::parse("new").unwrap(), Sighting::Discovery);
        bench.changes(all, "2 are queued.");
        assert_eq!((bench.queues.first.len(), bench.queues.retry.len()), (1, 2));
        bench.changes_nothing(all, "No node waits.");
    }

    #[test]
    fn what_a_full_queue_has_no_room_for_is_due() {
        let bench = Bench::new(2);
        for name in ["n1", "n2", "n3", "n4"] {
            bench.fail(name);
        }
        bench.changes(
            r#"{"command":"retry","all":true}"#,
            "2 are queued; the queue is full, the others are taken when they are seen next.",
        );
        let registry = bench.operator.roster.registry();
        assert_eq!(registry.counts().waiting, 2);
        let now = Instant::now();
        assert!(registry.nodes().all(|node| match node.state {
            NodeState::Waiting { due } => due <= now,
            _ => true,
        }));
    }

    #[test]
    fn a_pause_at_the_end_is_refused_as_a_retry_is() {
        let bench = Bench::new(10);
        bench.operator.gate.close(Reason::Draining);
        bench.refuses(r#"{"command":"pause"}"#, "shutting down");
        bench.refuses(r#"{"command":"retry","node":"n1"}"#, "shutting down");
    }

    #[test]
    fn a_denied_node_is_left_alone_until_it_is_allowed() {
        let bench = Bench::new(10);
        let (deny, allow, retry) = (
            r#"{"command":"deny","node":"n1"}"#,
            r#"{"command":"allow","node":"n1"}"#,
            r#"{"command":"retry","node":"n1"}"#,
        );
        bench.changes_nothing(allow, "n1 is not denied.");
        let until = "until it is allowed or the daemon ends";
        bench.changes(deny, &format!("n1 is left alone {until}; it was not known here."));
        bench.changes_nothing(deny, "n1 is denied already.");
        bench.refuses(retry, "n1 is denied: allow it first");
        bench.changes(allow, "n1 is taken when it is seen next.");
        bench.give(retry).unwrap();
        bench.changes(deny, &format!("n1 is left alone {until}."));
        bench.give(allow).unwrap();
        bench.give(retry).unwrap();
        // What was queued before is of the past.
        bench.queues.first.try_recv().unwrap();
        let key = bench.take();
        bench.changes(
            deny,
            "n1 is being worked on and finished, then left alone until it is allowed or the daemon ends.",
        );
        assert_eq!(bench.finish(&key, Outcome::Failed), Next::Absent);
    }

    #[test]
    fn asks_for_status_and_nodes() {
        let bench = Bench::new(10);
        let give = |command| bench.operator.obey(serde_json::from_str(command).unwrap());
        let Ok(Answer::Status(status)) = give(r#"{"command":"status"}"#) else { panic!("status") };
        assert_eq!(*status, testing::status());
        let command =
            r#"{"command":"nodes","state":"stuck","name":"web","sort":"failures","limit":100}"#;
        let Ok(Answer::Nodes(nodes)) = give(command) else { panic!("nodes") };
        assert_eq!(nodes.nodes[0].node, "web");
    }

    #[test]
    fn says_all_that_is_known_of_one_node() {
        let bench = Bench::new(10);
        let ask = |node: &str| {
            let command = Command::Node { node: node.to_owned() };
            match bench.operator.obey(command).unwrap() {
                Answer::Node(known) => *known,
                other => panic!("{other:?}"),
            }
        };
        let nobody = ask("nobody");
        assert_eq!((&nobody.listed, nobody.denied_secs), (&None, None));
        // By the status that stands for every one here.
        assert!(!nobody.closed_by.is_empty());
        bench.fail("n1");
        bench.fail("n11");
        let listed = ask("n1").listed.expect("it is known");
        assert_eq!((listed.node.as_str(), listed.state.as_str()), ("n1", "waiting"));
        assert_eq!((listed.failures, listed.reason.as_str()), (3, "because"));
        bench.give(r#"{"command":"deny","node":"n1"}"#).unwrap();
        let denied = ask("n1");
        assert!(denied.listed.is_none() && denied.denied_secs.is_some(), "{denied:?}");
        bench.refuses(r#"{"command":"node","node":"*"}"#, "\"*\": identity holds a wildcard");
    }

    #[test]
    fn refuses_what_is_no_command_of_ours() {
        let bench = Bench::new(10);
        for (command, error) in [
            (r#"{"command":"dance"}"#, "unknown variant `dance`, expected one of `status`, "),
            (r#"{}"#, "missing field `command`"),
            (r#"[]"#, ""),
            (r#"{"command":"pause","node":"n1"}"#, "unknown field `node`"),
            (r#"{"command":"deny"}"#, "missing field `node`"),
            (r#"{"command":"nodes","state":"asleep"}"#, "unknown variant `asleep`"),
            (r#"{"command":"nodes","limit":-1}"#, "invalid value"),
            (
                r#"{"command":"nodes","limit":10001}"#,
                "limit: found 10001, wanted a number from 1 to 10000",
            ),
            (r#"{"command":"nodes","limit":0}"#, "limit: found 0, wanted a number from 1 to 10000"),
            (r#"{"command":"nodes","size":1}"#, "unknown field `size`"),
            (r#"{"command":"retry"}"#, "retry needs either a node or all"),
            (r#"{"command":"retry","node":"n1","all":true}"#, "retry needs either a node or all"),
        ] {
            bench.refuses(command, error);
        }
        assert!(bench.operator.gate.begin().is_ok());
    }
}
