//! What can be wrong with a node, and how each case is named on the command line.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What a node can be asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// `rpcutil#inventory`
    Inventory,
    /// `rpcutil#ping`
    Ping,
    /// `choria_provision#jwt`
    Jwt,
    /// `choria_provision#gen25519`
    Gen25519,
    /// `choria_provision#gencsr`
    GenCsr,
    /// `choria_provision#configure`
    Configure,
    /// `choria_provision#restart`
    Restart,
    /// `choria_provision#shutdown`
    Shutdown,
    /// `choria_provision#release_update`
    ReleaseUpdate,
    /// `choria_provision#reprovision`
    Reprovision,
}

impl Action {
    /// All of them.
    pub const ALL: [Action; 10] = [
        Action::Inventory,
        Action::Ping,
        Action::Jwt,
        Action::Gen25519,
        Action::GenCsr,
        Action::Configure,
        Action::Restart,
        Action::Shutdown,
        Action::ReleaseUpdate,
        Action::Reprovision,
    ];

    /// Its name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Action::Inventory => "inventory",
            Action::Ping => "ping",
            Action::Jwt => "jwt",
            Action::Gen25519 => "gen25519",
            Action::GenCsr => "gencsr",
            Action::Configure => "configure",
            Action::Restart => "restart",
            Action::Shutdown => "shutdown",
            Action::ReleaseUpdate => "release_update",
            Action::Reprovision => "reprovision",
        }
    }

    /// The agent it belongs to.
    pub fn agent(self) -> &'static str {
        match self {
            Action::Inventory | Action::Ping => "rpcutil",
            _ => "choria_provision",
        }
    }

    /// The action `name` of `agent`.
    pub fn find(agent: &str, name: &str) -> Option<Action> {
        Action::ALL.into_iter().find(|action| action.agent() == agent && action.name() == name)
    }

    /// The fields of a good reply's `data`.
    pub fn fields(self) -> &'static [&'static str] {
        match self {
            Action::Inventory => &["version", "upgradable"],
            Action::Ping => &["pong"],
            Action::Jwt => &["jwt", "ecdh_public"],
            Action::Gen25519 => &["public_key", "directory", "signature"],
            Action::GenCsr => &["csr", "public_key", "ssldir"],
            _ => &["message"],
        }
    }
}

/// Which answers a fault concerns: all, or those of one action.
pub type On = Option<Action>;

/// How an envelope is spoiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Envelope {
    /// The hash is that of another text.
    Hash,
    /// Another identity in reply and transport.
    Sender,
    /// The id of no request.
    Id,
    /// The payload is no JSON.
    Garbage,
    /// The transport's data is no base64.
    Base64,
    /// The body is no JSON.
    Body,
    /// The body is cut off in the middle.
    HalfBody,
    /// The body is a JSON list.
    ListBody,
}

/// How a value in a reply's `data` is spoiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// It is `null`.
    Null,
    /// It is not there.
    Missing,
    /// It is a number.
    Number,
    /// It is a boolean, or a text where a boolean is expected.
    Boolean,
    /// It is a list.
    List,
    /// It is an object.
    Object,
    /// It is an empty text.
    Empty,
}

impl Damage {
    /// All of them.
    pub const ALL: [Damage; 7] = [
        Damage::Null,
        Damage::Missing,
        Damage::Number,
        Damage::Boolean,
        Damage::List,
        Damage::Object,
        Damage::Empty,
    ];
}

/// What is wrong with a CSR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Csr {
    /// Its common name is another's.
    OtherCn,
    /// It asks for a DNS name that is denied.
    DeniedDns,
    /// It asks for an e-mail name that is denied.
    DeniedEmail,
    /// It is plain text.
    NotPem,
    /// It is PEM around something else.
    NotDer,
    /// It is empty.
    Empty,
    /// Its signature does not fit.
    BrokenSignature,
}

/// What is wrong with a provisioning JWT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token {
    /// Signed by a key nobody trusts.
    Foreign,
    /// No longer valid.
    Expired,
    /// Made for something else.
    Purpose,
    /// Not there.
    Empty,
    /// No JWT at all.
    Garbage,
    /// Nothing is wrong: it ends in a line feed, as a file written by an editor does.
    Newline,
}

/// What is wrong with one node.
#[derive(Debug, Clone, PartialEq)]
pub enum Fault {
    /// Announces itself and is not there.
    Gone,
    /// Is there and never says a word after its startup event.
    Silent,
    /// Leaves this action, and all that comes after it, unanswered, though it acts on it.
    SilentFrom(Action),
    /// Answers this action and then nothing any more.
    SilentAfter(Action),
    /// Answers this action and is not there any more.
    GoneAfter(Action),
    /// Answers this action, then restarts into provisioning: lock and keys are lost.
    RebootsAfter(Action),
    /// Does what this action asks, and keeps its answer back until it is told to go on.
    Holds(Action),
    /// Does not hear the first requests for this action.
    Deaf(Action, u32),
    /// Answers late.
    Slow(On, Duration),
    /// Another provisioner holds its lock.
    Locked,
    /// Has another provisioning token.
    WrongToken,
    /// Is no longer in provisioning mode.
    NotProvisioning,
    /// Its clock is so far off that each request is too old for it.
    Skewed,
    /// Its provisioning JWT.
    Token(Token),
    /// Its CSR.
    Csr(Csr),
    /// Signs another nonce.
    NonceSignature,
    /// Shows a public key that is too short.
    ShortKey,
    /// Shows a public key of so many bytes.
    KeyLength(usize),
    /// Shows a public key that anybody can sign for.
    WeakKey,
    /// Sends a spoiled envelope, and the right one right after it if the flag is set.
    Envelope(Envelope, On, bool),
    /// Answers twice, with different words.
    TwoAnswers(Action),
    /// Answers everything twice, with the same words.
    Twice,
    /// Spoils one field of a good reply, or its whole `data`.
    Data(Action, Option<&'static str>, Damage),
    /// Refuses with this status.
    Status(Action, u64),
    /// Refuses `configure`: the disk is full.
    ConfigureRefused,
    /// Restarts, but its answer is lost.
    RestartLost,
    /// Its inventory is this large, in bytes.
    HugeInventory(usize),
    /// Its facts are nested this deep.
    DeepInventory(usize),
    /// Answers discovery under this name.
    DiscoveredAs(String),
    /// Publishes this many startup events at once.
    EventStorm(u32),
    /// Comes back unprovisioned this many times, whatever its configuration says.
    Returns(u32),
    /// Takes this long for an update, and does not answer it.
    SlowUpdate(Duration),
    /// Accepts updates and is no other version afterwards.
    UpdateInVain,
}

/// What a correct provisioner makes of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// It ends up configured and restarted.
    Provisioned,
    /// It does not.
    Broken,
    /// Both are right.
    Either,
}

impl Fault {
    /// What a correct provisioner makes of such a node.
    pub fn expected(&self) -> Expected {
        match self {
            Fault::Deaf(..)
            | Fault::Twice
            | Fault::EventStorm(_)
            | Fault::RestartLost
            | Fault::Returns(_)
            | Fault::SlowUpdate(_)
            | Fault::RebootsAfter(_)
            | Fault::Token(Token::Newline) => Expected::Provisioned,
            // What is certainly no answer of this node is dropped; a broken body of its own may fail the try.
            Fault::Envelope(Envelope::Body | Envelope::HalfBody | Envelope::ListBody, _, true) => {
                Expected::Either
            }
            Fault::Envelope(_, _, true) => Expected::Provisioned,
            Fault::SilentAfter(Action::Configure | Action::Restart)
            | Fault::GoneAfter(Action::Configure | Action::Restart)
            | Fault::SilentFrom(Action::Restart)
            | Fault::TwoAnswers(Action::Restart | Action::Configure)
            | Fault::Slow(..)
            | Fault::HugeInventory(_)
            | Fault::DeepInventory(_)
            | Fault::DiscoveredAs(_)
            | Fault::Holds(_)
            // Whether it is asked to update itself is for the helper.
            | Fault::UpdateInVain => Expected::Either,
            // These leave the node configured and restarting, whatever the provisioner thinks of its answer.
            Fault::Envelope(_, Some(Action::Restart), false) | Fault::Data(Action::Restart, ..) => {
                Expected::Either
            }
            // The message is for people only, so one that is not there may be let pass.
            Fault::Data(Action::Configure, Some("message"), Damage::Missing) => Expected::Either,
            // Without the feature that uses them these fields are nobody's business.
            Fault::Data(Action::Jwt, Some("ecdh_public"), Damage::Empty)
            | Fault::Data(Action::Inventory, Some(_), _)
            | Fault::Data(Action::Gen25519 | Action::Shutdown | Action::ReleaseUpdate, ..)
            | Fault::Status(
                Action::Gen25519 | Action::Shutdown | Action::ReleaseUpdate | Action::Ping,
                _,
            )
            | Fault::NonceSignature
            | Fault::ShortKey
            | Fault::KeyLength(_)
            | Fault::WeakKey
            | Fault::Csr(_)
            | Fault::Data(Action::GenCsr, ..)
            | Fault::Status(Action::GenCsr, _) => Expected::Either,
            _ => Expected::Broken,
        }
    }

    /// Every way to spoil `data` and its fields in the reply to `action`.
    pub fn every_damage(action: Action) -> Vec<Fault> {
        let whole = [Damage::Null, Damage::Missing, Damage::Number, Damage::List, Damage::Empty];
        let whole = whole.into_iter().map(|damage| Fault::Data(action, None, damage));
        let fields = action.fields().iter().flat_map(|&field| {
            let wrong = Damage::ALL.into_iter().filter(|&damage| damage != Damage::Empty);
            wrong.map(move |damage| Fault::Data(action, Some(field), damage))
        });
        whole.chain(fields).collect()
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on = |on: &On| on.map_or(String::new(), |action| format!(":{}", action.name()));
        match self {
            Fault::Gone => f.write_str("gone"),
            Fault::Silent => f.write_str("silent"),
            Fault::SilentFrom(action) => write!(f, "silent-from:{}", action.name()),
            Fault::SilentAfter(action) => write!(f, "silent-after:{}", action.name()),
            Fault::GoneAfter(action) => write!(f, "gone-after:{}", action.name()),
            Fault::RebootsAfter(action) => write!(f, "reboots-after:{}", action.name()),
            Fault::Holds(action) => write!(f, "holds:{}", action.name()),
            Fault::Deaf(action, times) => write!(f, "deaf:{}:{times}", action.name()),
            Fault::Slow(scope, delay) => write!(f, "slow:{}ms{}", delay.as_millis(), on(scope)),
            Fault::Locked => f.write_str("locked"),
            Fault::WrongToken => f.write_str("wrong-token"),
            Fault::NotProvisioning => f.write_str("not-provisioning"),
            Fault::Skewed => f.write_str("skewed"),
            Fault::Token(fault) => f.write_str(name_of(&TOKENS, fault)),
            Fault::Csr(fault) => f.write_str(name_of(&CSRS, fault)),
            Fault::NonceSignature => f.write_str("nonce-signature"),
            Fault::ShortKey => f.write_str("short-key"),
            Fault::KeyLength(bytes) => write!(f, "key-length:{bytes}"),
            Fault::WeakKey => f.write_str("weak-key"),
            Fault::Envelope(fault, scope, right) => {
                let name = name_of(&ENVELOPES, fault);
                write!(f, "{name}{}{}", on(scope), if *right { "+right" } else { "" })
            }
            Fault::TwoAnswers(action) => write!(f, "two-answers:{}", action.name()),
            Fault::Twice => f.write_str("twice"),
            Fault::Data(action, field, damage) => {
                write!(f, "data-{}:{}", name_of(&DAMAGES, damage), action.name())?;
                field.map_or(Ok(()), |field| write!(f, ".{field}"))
            }
            Fault::Status(action, code) => write!(f, "status:{}:{code}", action.name()),
            Fault::ConfigureRefused => f.write_str("configure-refused"),
            Fault::RestartLost => f.write_str("restart-lost"),
            Fault::HugeInventory(size) => write!(f, "huge-inventory:{size}"),
            Fault::DeepInventory(depth) => write!(f, "deep-inventory:{depth}"),
            Fault::DiscoveredAs(name) => write!(f, "discovered-as:{name}"),
            Fault::EventStorm(count) => write!(f, "event-storm:{count}"),
            Fault::Returns(times) => write!(f, "returns:{times}"),
            Fault::SlowUpdate(time) => write!(f, "slow-update:{}ms", time.as_millis()),
            Fault::UpdateInVain => f.write_str("update-in-vain"),
        }
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Fault, String> {
        let (text, right) = text.strip_suffix("+right").map_or((text, false), |text| (text, true));
        let (name, rest) = text.split_once(':').map_or((text, None), |(a, b)| (a, Some(b)));
        let (first, second) = match rest.and_then(|rest| rest.split_once(':')) {
            Some((first, second)) => (Some(first), Some(second)),
            None => (rest, None),
        };
        let action = |default: Option<Action>| match first {
            None => default.ok_or_else(|| format!("{name} needs an action, as {name}:jwt")),
            Some(word) => action_named(word),
        };
        let number = |text: Option<&str>, default: u64| match text {
            None => Ok(default),
            Some(text) => text.parse::<u64>().map_err(|_| format!("{text} is no number")),
        };
        let millis =
            |text: &str| number(Some(text.trim_end_matches("ms")), 0).map(Duration::from_millis);
        Ok(match name {
            "gone" => Fault::Gone,
            "silent" => Fault::Silent,
            "silent-from" => Fault::SilentFrom(action(None)?),
            "silent-after" => Fault::SilentAfter(action(None)?),
            "gone-after" => Fault::GoneAfter(action(None)?),
            "reboots-after" => Fault::RebootsAfter(action(None)?),
            "holds" => Fault::Holds(action(None)?),
            "deaf" => Fault::Deaf(action(None)?, number(second, 1)? as u32),
            "slow" => {
                let delay = millis(first.unwrap_or("2000ms"))?;
                Fault::Slow(second.map(action_named).transpose()?, delay)
            }
            "slow-update" => Fault::SlowUpdate(millis(first.unwrap_or("30000ms"))?),
            "update-in-vain" => Fault::UpdateInVain,
            "locked" => Fault::Locked,
            "wrong-token" => Fault::WrongToken,
            "not-provisioning" => Fault::NotProvisioning,
            "skewed" => Fault::Skewed,
            "nonce-signature" => Fault::NonceSignature,
            "short-key" => Fault::ShortKey,
            "key-length" => Fault::KeyLength(number(first, 31)? as usize),
            "weak-key" => Fault::WeakKey,
            "two-answers" => Fault::TwoAnswers(action(Some(Action::Jwt))?),
            "twice" => Fault::Twice,
            "status" => Fault::Status(action(None)?, number(second, 1)?),
            "configure-refused" => Fault::ConfigureRefused,
            "restart-lost" => Fault::RestartLost,
            "huge-inventory" => Fault::HugeInventory(number(first, 300_000)? as usize),
            "deep-inventory" => Fault::DeepInventory(number(first, 100_000)? as usize),
            "discovered-as" => Fault::DiscoveredAs(rest.unwrap_or(">").to_owned()),
            "event-storm" => Fault::EventStorm(number(first, 100)? as u32),
            "returns" => Fault::Returns(number(first, 1)? as u32),
            _ => {
                if let Some(&(_, fault)) = TOKENS.iter().find(|(word, _)| *word == name) {
                    Fault::Token(fault)
                } else if let Some(&(_, fault)) = CSRS.iter().find(|(word, _)| *word == name) {
                    Fault::Csr(fault)
                } else if let Some(&(_, fault)) = ENVELOPES.iter().find(|(word, _)| *word == name) {
                    Fault::Envelope(fault, first.map(action_named).transpose()?, right)
                } else if let Some((_, damage)) = name
                    .strip_prefix("data-")
                    .and_then(|name| DAMAGES.iter().find(|(word, _)| *word == name))
                {
                    let rest = rest.ok_or_else(|| format!("{name} needs an action"))?;
                    let (word, field) =
                        rest.split_once('.').map_or((rest, None), |(a, b)| (a, Some(b)));
                    let action = action_named(word)?;
                    let field = field
                        .map(|field| {
                            let mut known = action.fields().iter().copied();
                            known
                                .find(|known| *known == field)
                                .ok_or_else(|| format!("{word} has no field {field}"))
                        })
                        .transpose()?;
                    Fault::Data(action, field, *damage)
                } else {
                    return Err(format!("no fault is called {name}"));
                }
            }
        })
    }
}

/// Reads `gone=3,silent=2`, the form of `--faults`.
///
/// # Errors
///
/// What cannot be understood, in words.
pub fn parse_list(text: &str) -> Result<Vec<(usize, Fault)>, String> {
    text.split(',')
        .map(str::trim)
        .filter(|item| !item.is_empty())
        .map(|item| {
            let (name, count) = item.rsplit_once('=').unwrap_or((item, "1"));
            let count = count.parse().map_err(|_| format!("{item}: {count} is no number"))?;
            Ok((count, name.parse()?))
        })
        .collect()
}

fn action_named(word: &str) -> Result<Action, String> {
    let mut actions = Action::ALL.into_iter();
    actions
        .find(|action| action.name() == word)
        .ok_or_else(|| format!("no action is called {word}"))
}

fn name_of<T: PartialEq>(names: &[(&'static str, T)], value: &T) -> &'static str {
    names.iter().find(|(_, known)| known == value).map_or("?", |(name, _)| name)
}

const TOKENS: [(&str, Token); 6] = [
    ("bad-jwt", Token::Foreign),
    ("expired-jwt", Token::Expired),
    ("jwt-purpose", Token::Purpose),
    ("empty-jwt", Token::Empty),
    ("garbage-jwt", Token::Garbage),
    ("newline-jwt", Token::Newline),
];

const CSRS: [(&str, Csr); 7] = [
    ("other-cn", Csr::OtherCn),
    ("denied-name", Csr::DeniedDns),
    ("denied-email", Csr::DeniedEmail),
    ("csr-not-pem", Csr::NotPem),
    ("csr-not-der", Csr::NotDer),
    ("csr-empty", Csr::Empty),
    ("csr-signature", Csr::BrokenSignature),
];

const ENVELOPES: [(&str, Envelope); 8] = [
    ("wrong-hash", Envelope::Hash),
    ("forged-sender", Envelope::Sender),
    ("wrong-id", Envelope::Id),
    ("garbage", Envelope::Garbage),
    ("bad-base64", Envelope::Base64),
    ("undecodable-body", Envelope::Body),
    ("half-body", Envelope::HalfBody),
    ("list-body", Envelope::ListBody),
];

const DAMAGES: [(&str, Damage); 7] = [
    ("null", Damage::Null),
    ("missing", Damage::Missing),
    ("number", Damage::Number),
    ("boolean", Damage::Boolean),
    ("list", Damage::List),
    ("object", Damage::Object),
    ("empty", Damage::Empty),
];
