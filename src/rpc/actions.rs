//! The actions we call: all of `choria_provision`, and `rpcutil#inventory`.
//!
//! A request type for each action writes the RPC body, keys in the original's order, and names the type of its reply.
//! Replies are a stranger's JSON: reading one ends in a value or in [`BadReply`], whatever it holds. Inputs, outputs and
//! time-outs as in go-choria's DDL files; what is called when, and how often, is for others to say.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::protocol::json::{self, JsonError, Object, SortError, excerpt};

/// What we can ask of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// `rpcutil#inventory`: facts, classes, version.
    Inventory,
    /// `choria_provision#jwt`: the provisioning JWT, and a fresh key for secret transport.
    Jwt,
    /// `choria_provision#gen25519`: a fresh identity key.
    Gen25519,
    /// `choria_provision#gencsr`: a fresh key and a certificate request for it.
    GenCsr,
    /// `choria_provision#release_update`: another version of Choria.
    ReleaseUpdate,
    /// `choria_provision#configure`: configuration and credentials.
    Configure,
    /// `choria_provision#restart`: leave provisioning mode.
    Restart,
    /// `choria_provision#shutdown`: stop for good.
    Shutdown,
}

impl Action {
    /// All of them.
    pub const ALL: [Action; 8] = [
        Action::Inventory,
        Action::Jwt,
        Action::Gen25519,
        Action::GenCsr,
        Action::ReleaseUpdate,
        Action::Configure,
        Action::Restart,
        Action::Shutdown,
    ];

    /// Agent and action as metrics and logs name them: `choria_provision#jwt`.
    pub fn label(self) -> &'static str {
        match self {
            Action::Inventory => "rpcutil#inventory",
            Action::Jwt => "choria_provision#jwt",
            Action::Gen25519 => "choria_provision#gen25519",
            Action::GenCsr => "choria_provision#gencsr",
            Action::ReleaseUpdate => "choria_provision#release_update",
            Action::Configure => "choria_provision#configure",
            Action::Restart => "choria_provision#restart",
            Action::Shutdown => "choria_provision#shutdown",
        }
    }

    /// The agent that has it.
    pub fn agent(self) -> &'static str {
        if self == Action::Inventory { "rpcutil" } else { "choria_provision" }
    }

    /// Its name within the agent.
    pub fn name(self) -> &'static str {
        let (_, name) = self.label().split_once('#').expect("every label has agent and action");
        name
    }

    /// Whether a request that the node may have heard is never sent again: silence may be a slow download, which a second
    /// request would repeat.
    pub fn is_sent_once(self) -> bool {
        self == Action::ReleaseUpdate
    }

    /// How long to wait for an answer: as long as the node may take, and `discovery_timeout` for the way.
    pub fn timeout(self, discovery_timeout: Duration) -> Duration {
        let agent = if self == Action::Inventory { 2 } else { 20 };
        discovery_timeout + Duration::from_secs(agent)
    }

    /// Whether each try replaces keys on the node, so that an earlier try's answer is worth nothing.
    pub fn only_last_answer_counts(self) -> bool {
        matches!(self, Action::Jwt | Action::Gen25519 | Action::GenCsr)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// A request to one action.
pub trait Call {
    /// Which action.
    const ACTION: Action;

    /// What the node answers on success.
    type Reply;

    /// The RPC body.
    fn body(&self) -> String;

    /// Reads the reply from the `data` of a body with status 0.
    ///
    /// # Errors
    ///
    /// [`BadReply`] for anything missing, `null` or of another type.
    fn read(data: &RawValue) -> Result<Self::Reply, BadReply>;
}

#[derive(Serialize)]
struct RequestBody<'a, D> {
    agent: &'static str,
    action: &'static str,
    data: &'a D,
}

fn body<C: Call + Serialize>(call: &C) -> String {
    let body = RequestBody { agent: C::ACTION.agent(), action: C::ACTION.name(), data: call };
    json::compact(&body).expect("strings and maps of strings always serialise")
}

/// Asks for facts, classes and version.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Inventory {}

/// Asks for the provisioning JWT.
#[derive(Clone, Copy, Serialize)]
pub struct Jwt<'a> {
    /// The provisioning token.
    pub token: &'a str,
}

/// Asks for a new Ed25519 key.
#[derive(Clone, Copy, Serialize)]
pub struct Gen25519<'a> {
    /// What the node signs to show that it holds the key.
    pub nonce: &'a str,
    /// The provisioning token.
    pub token: &'a str,
}

/// Asks for a new key and a certificate request.
#[derive(Clone, Copy, Serialize)]
pub struct GenCsr<'a> {
    /// The common name to ask for: the node's identity.
    pub cn: &'a str,
    /// The provisioning token.
    pub token: &'a str,
}

/// Tells a node to become another version.
#[derive(Clone, Copy, Serialize)]
pub struct ReleaseUpdate<'a> {
    /// URL of the repository.
    pub repository: &'a str,
    /// The provisioning token.
    pub token: &'a str,
    /// The version wanted.
    pub version: &'a str,
}

/// Gives a node its configuration. All inputs are always sent; what there is none of is empty.
#[derive(Clone, Copy, Serialize)]
pub struct Configure<'a> {
    /// Action policies by file name.
    pub action_policies: &'a BTreeMap<String, String>,
    /// CA certificates in PEM.
    pub ca: &'a str,
    /// The node's certificate in PEM.
    pub certificate: &'a str,
    /// The settings: a JSON object of text to text, as text.
    pub config: &'a str,
    /// Our half of the key exchange under which `key` is encrypted, in hex.
    pub ecdh_public: &'a str,
    /// The node's private key, encrypted.
    pub key: &'a str,
    /// Open Policy Agent policies by file name.
    pub opa_policies: &'a BTreeMap<String, String>,
    /// The server JWT.
    pub server_jwt: &'a str,
    /// Where certificates go.
    pub ssldir: &'a str,
    /// The provisioning token.
    pub token: &'a str,
}

/// Tells a configured node to leave provisioning mode.
#[derive(Clone, Copy, Serialize)]
pub struct Restart<'a> {
    /// Upper bound of the node's random wait, in seconds. Nodes refuse a number with a fraction and die of a negative one.
    #[serde(rename = "splay")]
    pub splay_secs: u32,
    /// The provisioning token.
    pub token: &'a str,
}

/// Tells a node to stop for good.
#[derive(Clone, Copy, Serialize)]
pub struct Shutdown<'a> {
    /// The provisioning token.
    pub token: &'a str,
}

/// What a node says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InventoryReply {
    /// All of it as compact JSON with sorted keys and numbers as the node wrote them: what helpers get.
    pub data: String,
    /// The version of Choria it runs.
    pub version: String,
    /// Whether it takes `release_update`.
    pub upgradable: bool,
}

/// The provisioning JWT.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct JwtReply {
    /// The token as the node has it on disk, unverified; it may end in a newline.
    pub jwt: String,
    /// The node's half of a key exchange, in hex; unchecked.
    pub ecdh_public: String,
}

/// A new Ed25519 key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gen25519Reply {
    /// The public half.
    pub public_key: [u8; 32],
    /// Where the node keeps the private half.
    pub directory: String,
    /// Over the nonce; unchecked.
    pub signature: [u8; 64],
}

/// A certificate request.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct GenCsrReply {
    /// The request in PEM; unchecked.
    pub csr: String,
    /// The public key in PEM; unchecked. Labelled `PUBLIC KEY`, but PKCS#1 inside.
    pub public_key: String,
    /// Where the node keeps key and certificates.
    pub ssldir: String,
}

/// What the node says it will do now.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct MessageReply {
    /// For people only, so a node that leaves it out has agreed all the same.
    #[serde(default)]
    pub message: String,
}

impl Call for Inventory {
    const ACTION: Action = Action::Inventory;
    type Reply = InventoryReply;

    fn body(&self) -> String {
        body(self)
    }

    fn read(data: &RawValue) -> Result<InventoryReply, BadReply> {
        let mut fields = json::fields(data).map_err(data_error)?;
        let version = fields.get("version").ok_or(BadReply::Missing { field: "version" })?;
        let version = json::text(version).map_err(data_error)?.into_owned();
        // The original fills in this one output, and helpers may rely on it.
        let upgradable = *fields.entry("upgradable".to_owned()).or_insert(RawValue::FALSE);
        let upgradable = serde_json::from_str(upgradable.get()).map_err(data_error)?;
        let data = json::sorted(&fields).map_err(|error| match error {
            SortError::Json(error) => BadReply::Data(error),
            SortError::TooDeep => BadReply::TooDeep,
        })?;
        Ok(InventoryReply { data, version, upgradable })
    }
}

impl Call for Jwt<'_> {
    const ACTION: Action = Action::Jwt;
    type Reply = JwtReply;

    fn body(&self) -> String {
        body(self)
    }

    fn read(data: &RawValue) -> Result<JwtReply, BadReply> {
        fields(data)
    }
}

impl Call for Gen25519<'_> {
    const ACTION: Action = Action::Gen25519;
    type Reply = Gen25519Reply;

    fn body(&self) -> String {
        body(self)
    }

    fn read(data: &RawValue) -> Result<Gen25519Reply, BadReply> {
        #[derive(Deserialize)]
        struct Fields<'a> {
            #[serde(borrow)]
            public_key: Cow<'a, str>,
            directory: String,
            #[serde(borrow)]
            signature: Cow<'a, str>,
        }
        let fields: Fields = fields(data)?;
        Ok(Gen25519Reply {
            public_key: hex("public_key", &fields.public_key)?,
            directory: fields.directory,
            signature: hex("signature", &fields.signature)?,
        })
    }
}

impl Call for GenCsr<'_> {
    const ACTION: Action = Action::GenCsr;
    type Reply = GenCsrReply;

    fn body(&self) -> String {
        body(self)
    }

    fn read(data: &RawValue) -> Result<GenCsrReply, BadReply> {
        fields(data)
    }
}

impl Call for ReleaseUpdate<'_> {
    const ACTION: Action = Action::ReleaseUpdate;
    type Reply = MessageReply;

    fn body(&self) -> String {
        body(self)
    }

    fn read(data: &RawValue) -> Result<MessageReply, BadReply> {
        fields(data)
    }
}

impl Call for Configure<'_> {
    const ACTION: Action = Action::Configure;
    type Reply = MessageReply;

    fn body(&self) -> String {
        body(self)
    }

    fn read(data: &RawValue) -> Result<MessageReply, BadReply> {
        fields(data)
    }
}

impl Call for Restart<'_> {
    const ACTION: Action = Action::Restart;
    type Reply = MessageReply;

    fn body(&self) -> String {
        body(self)
    }

    fn read(data: &RawValue) -> Result<MessageReply, BadReply> {
        fields(data)
    }
}

impl Call for Shutdown<'_> {
    const ACTION: Action = Action::Shutdown;
    type Reply = MessageReply;

    fn body(&self) -> String {
        body(self)
    }

    fn read(data: &RawValue) -> Result<MessageReply, BadReply> {
        fields(data)
    }
}

fn fields<'a, T: Deserialize<'a>>(data: &'a RawValue) -> Result<T, BadReply> {
    let Object(fields) = serde_json::from_str(data.get()).map_err(data_error)?;
    Ok(fields)
}

fn data_error(error: serde_json::Error) -> BadReply {
    BadReply::Data(error.into())
}

fn hex<const N: usize>(field: &'static str, text: &str) -> Result<[u8; N], BadReply> {
    let mut bytes = [0; N];
    let digits = text.as_bytes();
    if digits.len() != 2 * N {
        return Err(BadReply::Hex { field });
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |c: u8| char::from(c).to_digit(16).ok_or(BadReply::Hex { field });
        let value = digit(pair[0])? << 4 | digit(pair[1])?;
        *byte = u8::try_from(value).map_err(|_| BadReply::Hex { field })?;
    }
    Ok(bytes)
}

/// The body of a reply.
#[derive(Debug, Clone)]
pub struct Body {
    /// The action that answers; empty if the node could not read the request.
    pub action: String,
    /// 0 for success, and the only value for it.
    pub code: u8,
    /// `OK`, or what went wrong.
    pub message: String,
    /// The outputs, if there is anything but `null`.
    pub data: Option<Box<RawValue>>,
}

impl Body {
    /// Reads an RPC reply.
    ///
    /// # Errors
    ///
    /// [`BadReply::Body`].
    pub fn parse(json: &str) -> Result<Body, BadReply> {
        #[derive(Deserialize)]
        struct Fields {
            action: String,
            statuscode: u8,
            statusmsg: String,
            data: Option<Box<RawValue>>,
        }
        let Object(fields): Object<Fields> =
            serde_json::from_str(json).map_err(|error| BadReply::Body(error.into()))?;
        Ok(Body {
            action: fields.action,
            code: fields.statuscode,
            message: fields.statusmsg,
            data: fields.data,
        })
    }

    /// The typed reply of a body with code 0.
    ///
    /// # Errors
    ///
    /// [`BadReply`].
    pub fn reply<C: Call>(&self) -> Result<C::Reply, BadReply> {
        if self.action != C::ACTION.name() {
            return Err(BadReply::OtherAction { found: excerpt(&self.action, 40) });
        }
        C::read(self.data.as_ref().ok_or(BadReply::Missing { field: "data" })?)
    }
}

/// What is wrong with a node's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadReply {
    /// The body is no RPC reply.
    Body(JsonError),
    /// An output is of the wrong type.
    Data(JsonError),
    /// An output, or all of them, are not there.
    Missing {
        /// Which.
        field: &'static str,
    },
    /// Not hexadecimal digits of the right number.
    Hex {
        /// Which output.
        field: &'static str,
    },
    /// The answer is one to another action.
    OtherAction {
        /// Which.
        found: String,
    },
    /// The inventory is nested too deeply.
    TooDeep,
    /// Well-formed, and a check of ours does not believe it.
    Unconvincing,
}

impl fmt::Display for BadReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BadReply::Body(_) => f.write_str("body is no RPC reply"),
            BadReply::Data(_) => f.write_str("malformed outputs"),
            BadReply::Missing { field } => write!(f, "{field} is missing"),
            BadReply::Hex { field } => {
                write!(f, "{field} is not the right number of hexadecimal digits")
            }
            BadReply::OtherAction { found } => write!(f, "answer to the other action '{found}'"),
            BadReply::TooDeep => f.write_str("inventory is nested too deeply"),
            BadReply::Unconvincing => f.write_str("a check refused it"),
        }
    }
}

impl std::error::Error for BadReply {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            BadReply::Body(source) | BadReply::Data(source) => Some(source),
            BadReply::Missing { .. }
            | BadReply::Hex { .. }
            | BadReply::OtherAction { .. }
            | BadReply::TooDeep
            | BadReply::Unconvincing => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::protocol::json::hostile;
    use crate::rpc::testing::good_body;

    type Messages = BTreeMap<String, String>;

    const INSECURE: &str = include_str!("../../tests/vectors/captures/insecure/messages.jsonl");
    const X509: &str = include_str!("../../tests/vectors/captures/x509/messages.jsonl");
    const ISSUER: &str = include_str!("../../tests/vectors/captures/issuer/messages.jsonl");

    /// The bodies of all recorded RPC requests and replies, of either version of the protocol, by action.
    fn recorded(capture: &str, prefix: &str) -> Vec<(String, String)> {
        use base64::Engine;
        use base64::engine::general_purpose::STANDARD;
        let inner = |text: &Value| serde_json::from_str::<Value>(text.as_str().unwrap()).unwrap();
        let bytes = |text: &Value| STANDARD.decode(text.as_str().unwrap()).unwrap();
        let decoded = |text: &Value| serde_json::from_slice::<Value>(&bytes(text)).unwrap();
        let lines = capture.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines
            .filter(|message| message["subject"].as_str().unwrap().starts_with(prefix))
            .filter_map(|message| {
                // An election's answers come to such a subject, too.
                let secure = decoded(inner(&message["payload"]).get("data")?);
                let of_version_2 = secure.get("request").or(secure.get("reply"));
                let body = match of_version_2 {
                    None => inner(&secure["message"])["message"].as_str().unwrap().to_owned(),
                    Some(text) => String::from_utf8(bytes(&decoded(text)["message"])).unwrap(),
                };
                let parsed: Value = serde_json::from_str(&body).unwrap_or_default();
                Some((parsed["action"].as_str().unwrap_or_default().to_owned(), body))
            })
            .collect()
    }

    #[test]
    fn writes_bodies_as_the_original_does() {
        let mut checked = 0;
        for capture in [INSECURE, X509, ISSUER] {
            for (action, body) in recorded(capture, "provisioning.node.") {
                assert_eq!(body_like(&action, &body), body);
                checked += 1;
            }
        }
        assert_eq!(checked, 15, "five calls in each recording");
    }

    /// Our body with the inputs of `recorded`.
    fn body_like(action: &str, recorded: &str) -> String {
        let request: Value = serde_json::from_str(recorded).unwrap();
        let data = &request["data"];
        let text = |key: &str| data[key].as_str().unwrap_or_else(|| panic!("{action} has {key}"));
        let map = |key: &str| serde_json::from_value::<Messages>(data[key].clone()).unwrap();
        match action {
            "inventory" => Inventory {}.body(),
            "jwt" => Jwt { token: text("token") }.body(),
            "gen25519" => Gen25519 { nonce: text("nonce"), token: text("token") }.body(),
            "gencsr" => GenCsr { cn: text("cn"), token: text("token") }.body(),
            "configure" => Configure {
                action_policies: &map("action_policies"),
                ca: text("ca"),
                certificate: text("certificate"),
                config: text("config"),
                ecdh_public: text("ecdh_public"),
                key: text("key"),
                opa_policies: &map("opa_policies"),
                server_jwt: text("server_jwt"),
                ssldir: text("ssldir"),
                token: text("token"),
            }
            .body(),
            "restart" => Restart { splay_secs: 1, token: text("token") }.body(),
            other => panic!("unknown action {other}"),
        }
    }

    #[test]
    fn writes_the_bodies_that_were_not_recorded() {
        assert_eq!(
            ReleaseUpdate { repository: "https://x", token: "t", version: "0.30.2" }.body(),
            r#"{"agent":"choria_provision","action":"release_update","data":{"repository":"https://x","token":"t","version":"0.30.2"}}"#
        );
        assert_eq!(
            Shutdown { token: "" }.body(),
            r#"{"agent":"choria_provision","action":"shutdown","data":{"token":""}}"#
        );
    }

    #[test]
    fn waits_as_long_as_a_node_may_take() {
        let discovery = Duration::from_secs(2);
        for action in Action::ALL {
            let expected = if action == Action::Inventory { 4 } else { 22 };
            assert_eq!(action.timeout(discovery), Duration::from_secs(expected), "{action}");
        }
    }

    /// Whether a reply to `action` with this body is one we can use.
    fn read(action: Action, body: &str) -> Result<(), BadReply> {
        let body = Body::parse(body)?;
        match action {
            Action::Inventory => body.reply::<Inventory>().map(drop),
            Action::Jwt => body.reply::<Jwt>().map(drop),
            Action::Gen25519 => body.reply::<Gen25519>().map(drop),
            Action::GenCsr => body.reply::<GenCsr>().map(drop),
            Action::ReleaseUpdate => body.reply::<ReleaseUpdate>().map(drop),
            Action::Configure => body.reply::<Configure>().map(drop),
            Action::Restart => body.reply::<Restart>().map(drop),
            Action::Shutdown => body.reply::<Shutdown>().map(drop),
        }
    }

    /// One value of each JSON type, and some that are of the right type and still wrong.
    fn wrong_values() -> Vec<Value> {
        vec![
            json!(null),
            json!(true),
            json!(false),
            json!(0),
            json!(-1),
            json!(1.5),
            json!(256),
            json!("text"),
            json!(""),
            json!("ö".repeat(32)),
            json!("0".repeat(63)),
            json!("z".repeat(64)),
            json!([]),
            json!(["a"]),
            json!({}),
            json!({"a": "b"}),
        ]
    }

    #[test]
    fn takes_no_reply_with_a_field_that_is_missing_null_or_wrong() {
        for action in Action::ALL {
            let good: Value = serde_json::from_str(&good_body(action)).unwrap();
            assert_eq!(read(action, &good.to_string()), Ok(()), "{action}");
            check_fields(action, &good, "");
            check_fields(action, &good, "/data");
        }
    }

    /// Spoils each field at `pointer`; a spoilt reply must be an error, unless the field may be what it became.
    fn check_fields(action: Action, good: &Value, pointer: &str) {
        for (key, value) in good.pointer(pointer).unwrap().as_object().unwrap() {
            let field = format!("{pointer}/{key}");
            let mut spoilt = good.clone();
            spoilt.pointer_mut(pointer).unwrap().as_object_mut().unwrap().remove(key);
            let may_be_missing = field == "/data/message"
                || field == "/data/upgradable"
                || action == Action::Inventory && is_unread(&field);
            assert_eq!(
                read(action, &spoilt.to_string()).is_ok(),
                may_be_missing,
                "{action}: {spoilt}"
            );
            for wrong in wrong_values() {
                let mut spoilt = good.clone();
                spoilt.pointer_mut(pointer).unwrap()[key] = wrong.clone();
                // Text in the place of text, unless it is digits: whether it is the right one is checked elsewhere.
                let is_same_type = value.is_string() && wrong.is_string()
                    || value.is_boolean() && wrong.is_boolean();
                let is_fine = match field.as_str() {
                    "/action" => false,
                    "/statuscode" => wrong == json!(0),
                    // Its only output may be missing.
                    "/data" if good["data"].get("message").is_some() => wrong.is_object(),
                    "/data/signature" => false,
                    "/data/public_key" if action == Action::Gen25519 => false,
                    field if action == Action::Inventory && is_unread(field) => true,
                    _ => is_same_type,
                };
                assert_eq!(
                    read(action, &spoilt.to_string()).is_ok(),
                    is_fine,
                    "{action}: {spoilt}"
                );
            }
        }
    }

    /// Fields of the inventory that are the helper's business only.
    fn is_unread(field: &str) -> bool {
        field.starts_with("/data/") && field != "/data/version" && field != "/data/upgradable"
    }

    #[test]
    fn takes_no_list_for_an_object() {
        assert!(Body::parse(r#"["jwt",0,"OK",{"jwt":"a","ecdh_public":"b"}]"#).is_err());
        let body = r#"{"action":"jwt","statuscode":0,"statusmsg":"OK","data":["a","b"]}"#;
        assert!(read(Action::Jwt, body).is_err());
        // A reply may hold a text in the place of outputs when there are none.
        let body = r#"{"action":"jwt","statuscode":0,"statusmsg":"OK","data":"{}"}"#;
        assert!(read(Action::Jwt, body).is_err());
    }

    #[test]
    fn reads_a_refusal_with_outputs_or_without() {
        for data in ["", r#","data":{}"#, r#","data":null"#, r#","data":"{}""#] {
            let body = format!(r#"{{"action":"","statuscode":4,"statusmsg":"no"{data}}}"#);
            assert_eq!(Body::parse(&body).unwrap().code, 4, "{body}");
        }
    }

    fn inventory(data: &str) -> Result<InventoryReply, BadReply> {
        Inventory::read(serde_json::from_str(data).unwrap())
    }

    #[test]
    fn sorts_the_inventory_as_helpers_know_it() {
        let reply = inventory(
            r#"{ "version" : "0.29.4", "facts": {"z": {"y": 1, "a": [ {"d":1,"c":2} , null ]}, "b": "<&>"},
                "agents": [], "machines": {} }"#,
        )
        .unwrap();
        assert_eq!(
            reply,
            InventoryReply {
                data: concat!(
                    r#"{"agents":[],"facts":{"b":"<&>","z":{"a":[{"c":2,"d":1},null],"y":1}},"#,
                    r#""machines":{},"upgradable":false,"version":"0.29.4"}"#
                )
                .to_owned(),
                version: "0.29.4".to_owned(),
                upgradable: false,
            }
        );
    }

    #[test]
    fn keeps_all_digits_and_texts_of_an_inventory() {
        let reply = inventory(
            r#"{"version":"v","upgradable":true,"facts":{"n":12345678901234567890123,"x":1.0,"e":1e-7,"t":"a\"\\\n\u00e9"}}"#,
        )
        .unwrap();
        assert!(reply.upgradable);
        assert_eq!(
            reply.data,
            r#"{"facts":{"e":1e-7,"n":12345678901234567890123,"t":"a\"\\\né","x":1.0},"upgradable":true,"version":"v"}"#
        );
    }

    #[test]
    fn gives_helpers_what_the_original_gives_them() {
        for (capture, input) in [
            (INSECURE, include_str!("../../tests/vectors/captures/insecure/helper-input.json")),
            (X509, include_str!("../../tests/vectors/captures/x509/helper-input.json")),
            (ISSUER, include_str!("../../tests/vectors/captures/issuer/helper-input.json")),
        ] {
            let replies = recorded(capture, "provisioning.reply.");
            let (_, body) = replies.iter().find(|(action, _)| action == "inventory").unwrap();
            let reply = Body::parse(body).unwrap().reply::<Inventory>().unwrap();
            let input: Value = serde_json::from_str(input).unwrap();
            assert_eq!(reply.data, input["inventory"].as_str().unwrap());
            assert_eq!(reply.version, "0.30.2");
        }
    }

    #[test]
    fn refuses_inventories_that_helpers_could_not_read() {
        for facts in [
            r#"{"a":"\ud800"}"#.to_owned(),
            format!("{}1{}", "[".repeat(70), "]".repeat(70)),
            format!("{}1{}", r#"{"a":"#.repeat(70), "}".repeat(70)),
        ] {
            let data = format!(r#"{{"version":"v","facts":{facts}}}"#);
            assert!(inventory(&data).is_err(), "{facts}");
        }
        let deep = "[".repeat(1_000_000);
        let body =
            format!(r#"{{"action":"inventory","statuscode":0,"statusmsg":"OK","data":{deep}"#);
        assert!(Body::parse(&body).is_err());
    }

    #[test]
    fn survives_any_nesting() {
        hostile::on_a_small_stack(|| {
            for value in hostile::values(100_000) {
                let _ = Body::parse(&value);
                for key in ["action", "statuscode", "statusmsg", "data", "other"] {
                    let body = format!(r#"{{"action":"a","statuscode":0,"{key}":{value}}}"#);
                    let _ = Body::parse(&body);
                }
                for key in ["facts", "version", "upgradable", "jwt", "nonce", "csr", "message"] {
                    let data = format!(r#"{{"version":"v","{key}":{value}}}"#);
                    let Ok(data) = RawValue::from_string(data) else { continue };
                    let _ = (Inventory::read(&data), Jwt::read(&data), Gen25519::read(&data));
                    let _ = (GenCsr::read(&data), Configure::read(&data));
                }
            }
        });
    }

    #[test]
    fn counts_levels_of_text_in_text_as_text() {
        // serde_json's own tree type would read this text as JSON, its nesting counted anew.
        let inner = format!("{}1{}", "[".repeat(60), "]".repeat(60));
        let data = json!({"version": "v", "facts": {"$serde_json::private::RawValue": inner}});
        let reply = inventory(&data.to_string()).unwrap();
        assert!(reply.data.contains(&format!(r#""$serde_json::private::RawValue":"{inner}""#)));
    }
}
