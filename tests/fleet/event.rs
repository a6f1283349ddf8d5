//! Lifecycle events as a node publishes them, in both encodings.
//!
//! Their keys and order follow go-choria `lifecycle/basic.go` and `lifecycle/lifecycle.go`.

use std::fmt::Write as _;

use super::envelope::quoted;

/// How events are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Encoding {
    /// The plain form inside a CloudEvents 1.0 frame, what servers send by default.
    #[default]
    Cloud,
    /// The plain form alone, what servers send with `plugin.choria.legacy_lifecycle_format`.
    Legacy,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The node started.
    Startup,
    /// The node is about to restart or stop.
    Shutdown,
    /// `configure` succeeded.
    Provisioned,
    /// `release_update` succeeded.
    Upgraded,
}

impl Kind {
    /// The word used in the subject and the protocol.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Startup => "startup",
            Kind::Shutdown => "shutdown",
            Kind::Provisioned => "provisioned",
            Kind::Upgraded => "upgraded",
        }
    }

    /// Where it is published.
    pub fn subject(self, component: &str) -> String {
        format!("choria.lifecycle.event.{}.{component}", self.word())
    }
}

/// One event, ready to be written.
#[derive(Debug, Clone, Copy)]
pub struct Event<'a> {
    /// What happened.
    pub kind: Kind,
    /// Whom it happened to.
    pub identity: &'a str,
    /// The component, also the last word of the subject.
    pub component: &'a str,
    /// A UUID of its own.
    pub id: &'a str,
    /// When, in Unix seconds.
    pub time: i64,
    /// The version running.
    pub version: &'a str,
    /// The version coming, of an upgrade.
    pub new_version: Option<&'a str>,
}

impl Event<'_> {
    /// The bytes to publish.
    pub fn encode(&self, encoding: Encoding) -> Vec<u8> {
        let word = self.kind.word();
        let (id, identity) = (quoted(self.id), quoted(self.identity));
        let mut data = format!(
            r#"{{"protocol":"io.choria.lifecycle.v1.{word}","id":{id},"identity":{identity},"component":{},"timestamp":{}"#,
            quoted(self.component),
            self.time
        );
        if matches!(self.kind, Kind::Startup | Kind::Upgraded) {
            let _ = write!(data, r#","version":{}"#, quoted(self.version));
        }
        if let Some(version) = self.new_version {
            let _ = write!(data, r#","new_version":{}"#, quoted(version));
        }
        data.push('}');
        match encoding {
            Encoding::Legacy => data.into_bytes(),
            Encoding::Cloud => {
                let subject = if self.identity.is_empty() {
                    String::new()
                } else {
                    format!(r#""subject":{identity},"#)
                };
                format!(
                    r#"{{"specversion":"1.0","id":{id},"source":"io.choria.lifecycle","type":"io.choria.lifecycle.v1.{word}",{subject}"datacontenttype":"application/json","time":"{}","data":{data}}}"#,
                    rfc3339(self.time)
                )
                .into_bytes()
            }
        }
    }
}

/// A random UUID of version 4, as events carry it.
pub fn uuid() -> String {
    let random = fastrand::u128(..);
    let random = (random & !(0xf << 76)) | (0x4 << 76);
    let random = (random & !(0x3 << 62)) | (0x2 << 62);
    let hex = format!("{random:032x}");
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Unix seconds as RFC 3339 in UTC.
fn rfc3339(time: i64) -> String {
    let (days, seconds) = (time.div_euclid(86_400), time.rem_euclid(86_400));
    // Howard Hinnant's days-to-date algorithm: eras of 400 years that begin in March.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        seconds / 3_600,
        seconds / 60 % 60,
        seconds % 60
    )
}
