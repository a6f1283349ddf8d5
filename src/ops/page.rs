//! The status page: one value as HTML, for somebody who was woken up and holds a phone.
//!
//! What is wrong comes first, in words and not by colour alone. It is complete as it is served and works without
//! JavaScript; with it, parts are replaced every five seconds. Nothing is loaded from elsewhere, and the policy that is
//! served along forbids it. Written by hand and not with a template crate: it is one page of a dozen parts, and what
//! must not be forgotten, escaping, is the type [`Html`] here.

use std::fmt::{self, Write};
use std::sync::OnceLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use form_urlencoded::Serializer;
use openssl::sha::sha256;

use crate::errors::without_middle;
use crate::ops::status::{
    Limit, Listed, NODES_MAX, Nodes, Outcome, Peer, Peers, Query, Sort, State, Status, Which,
    Worker, WrongLimit,
};
use crate::ops::text::{Html, Number, Span};

/// Nodes on the page unless more are asked for: what a phone shows at once.
const NODES_SHOWN: Limit = Limit::near(50);

/// Outcomes that are not folded away.
const OUTCOMES_SHOWN: usize = 10;

const STYLE: &str = include_str!("page/style.css");
const SCRIPT: &str = include_str!("page/refresh.js");

/// The query of the page's address: the most stuck nodes, unless others are asked for. A field without a value, or that we don't
/// know, is left out.
///
/// # Errors
///
/// What is wrong with the value of a field, and which ones there are.
pub fn query(text: &str) -> Result<Query, String> {
    let (state, sort) = (Which::Stuck, Sort::Failures);
    let mut query = Query { state, sort, ..Query::default() };
    for (key, value) in form_urlencoded::parse(text.as_bytes()) {
        let wanted =
            |known: &str| format!("{key}: found \"{}\", wanted {known}", value.escape_debug());
        match &*key {
            // A form sends all its fields.
            "state" | "name" | "sort" | "limit" if value.is_empty() => {}
            "state" => {
                let known =
                    || wanted(&format!("one of {}", Which::ALL.map(Which::word).join(", ")));
                query.state = Which::parse(&value).ok_or_else(known)?;
            }
            "name" => value.trim().clone_into(&mut query.name),
            "sort" => {
                let known = || wanted(&format!("one of {}", Sort::ALL.map(Sort::word).join(", ")));
                query.sort = Sort::parse(&value).ok_or_else(known)?;
            }
            "limit" => {
                let known = || wanted(&WrongLimit::wanted());
                query.limit = Some(Limit::parse(&value).ok_or_else(known)?);
            }
            "" if value.is_empty() => {}
            _ => {
                let shown = key.escape_debug();
                return Err(format!("found \"{shown}\", wanted state, name, sort or limit"));
            }
        }
    }
    Ok(query)
}

/// How many nodes the page shows for `query`.
pub fn shown(query: &Query) -> Query {
    Query { limit: query.limit.or(Some(NODES_SHOWN)), ..query.clone() }
}

/// The header `Content-Security-Policy` of the page: its own style and script, and nothing else.
pub fn policy() -> &'static str {
    static POLICY: OnceLock<String> = OnceLock::new();
    POLICY.get_or_init(|| {
        let hash = |text: &str| STANDARD.encode(sha256(text.as_bytes()));
        format!(
            "default-src 'none'; img-src data:; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; form-action 'self'; \
             base-uri 'none'; frame-ancestors 'none'",
            hash(STYLE),
            hash(SCRIPT)
        )
    })
}

/// The page.
pub fn render(status: &Status, nodes: &Nodes, query: &Query) -> String {
    let page = Page { status, nodes, query };
    let mut text =
        String::with_capacity(STYLE.len() + SCRIPT.len() + 8_192 + 400 * nodes.nodes.len());
    // Writing to memory can't fail.
    let _ = page.write(&mut text);
    text
}

struct Page<'a> {
    status: &'a Status,
    nodes: &'a Nodes,
    query: &'a Query,
}

impl Page<'_> {
    fn write(&self, out: &mut String) -> fmt::Result {
        let Status { state, identity, .. } = self.status;
        write!(
            out,
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"robots\" content=\"noindex\">\n<title>{} – {}</title>\n\
             <link rel=\"icon\" href=\"data:,\">\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n\
             <p id=\"stale\" class=\"bad\" role=\"alert\" hidden></p>\n",
            state.words(),
            Html(identity)
        )?;
        self.summary(out)?;
        self.tiles(out)?;
        self.listing(out)?;
        self.working(out)?;
        self.outcomes(out)?;
        self.facts(out)?;
        self.footer(out)?;
        write!(out, "</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n")
    }

    /// What it is doing, and everything that is wrong.
    fn summary(&self, out: &mut String) -> fmt::Result {
        let Status {
            state, state_secs, identity, site, version, uptime_secs, problems, ready, ..
        } = self.status;
        let class = match state {
            State::Provisioning if !ready => "bad",
            State::Provisioning if !problems.is_empty() => "warn",
            State::Provisioning => "ok",
            State::Standby | State::Listening => "idle",
            State::Paused | State::Draining => "warn",
            State::Disconnected => "bad",
        };
        write!(
            out,
            "<header id=\"summary\" data-live class=\"state {class}\"><h1>{}</h1>\n<p>for {} · {}",
            state.words(),
            Span(*state_secs),
            Html(identity)
        )?;
        if !site.is_empty() {
            write!(out, " · site {}", Html(site))?;
        }
        writeln!(out, " · version {} · up {}</p>", Html(version), Span(*uptime_secs))?;
        if !problems.is_empty() {
            out.write_str("<ul class=\"problems\">")?;
            let class = if *ready { "warn" } else { "bad" };
            for problem in problems {
                write!(out, "<li class=\"{class}\">{}</li>", Html(problem))?;
            }
            out.write_str("</ul>\n")?;
        }
        out.write_str("</header>\n")
    }

    /// How many nodes are where, each a way to their list, and how fast it goes.
    fn tiles(&self, out: &mut String) -> fmt::Result {
        let Status { counts, rates, totals, workers_max, .. } = self.status;
        out.write_str("<nav id=\"tiles\" data-live class=\"tiles\">\n")?;
        let mut tile = |which: Which, name: &str, number: usize, more: String| {
            let address = self.address(|query| {
                query.state = which;
                query.name.clear();
            });
            let number = Number(number as u64);
            writeln!(out, "<a href=\"{address}\">{name} <b>{number}</b><small>{more}</small></a>")
        };
        let queued =
            format!("{} asked, {} ready", Number(counts.asked as u64), Number(counts.ready as u64));
        tile(Which::Queued, "Queued", counts.queued, queued)?;
        tile(Which::Working, "Working", counts.working, format!("of {workers_max} workers"))?;
        tile(Which::Waiting, "To be retried", counts.waiting, "failed, deferred or busy".into())?;
        tile(Which::Settling, "Settling", counts.settling, "done a moment ago".into())?;
        let per_minute = |pick: fn(&crate::ops::status::RateOver) -> f64| {
            let spans: Vec<String> = rates
                .iter()
                .skip(1)
                .map(|rate| format!("{:.1} in {} min", pick(rate), rate.minutes))
                .collect();
            let now = rates.first().map_or(0.0, pick);
            format!("<b>{now:.1} <small>a minute</small></b><small>{}", spans.join(", "))
        };
        write!(
            out,
            "<div class=\"rate\">Provisioned {}, {} in all</small></div>\n\
             <div class=\"rate\">Errors {}, {} in all</small></div>\n</nav>\n",
            per_minute(|rate| rate.provisioned_per_minute),
            Number(totals.provisioned),
            per_minute(|rate| rate.errors_per_minute),
            Number(totals.errors)
        )
    }

    /// Nodes, as they are asked for.
    fn listing(&self, out: &mut String) -> fmt::Result {
        let title = match self.query.state {
            Which::All => "All nodes",
            Which::Stuck => "Stuck nodes",
            Which::Working => "Nodes being worked on",
            Which::Queued => "Queued nodes",
            Which::Waiting => "Nodes to be retried",
            Which::Settling => "Settling nodes",
            Which::Denied => "Denied nodes",
        };
        writeln!(out, "<h2 id=\"nodes\">{title}</h2>")?;
        self.form(out)?;
        out.write_str("<div id=\"listing\" data-live>\n")?;
        let Nodes { matching, nodes } = self.nodes;
        match (nodes.is_empty(), self.query.state, self.query.name.is_empty()) {
            (true, Which::Stuck, true) => {
                out.write_str("<p class=\"card ok\">No node is stuck.</p>\n")?
            }
            (true, ..) => out.write_str("<p class=\"card\">None.</p>\n")?,
            (false, ..) => self.table(out)?,
        }
        if nodes.len() < *matching {
            let (shown, all) = (Number(nodes.len() as u64), Number(*matching as u64));
            write!(out, "<p class=\"soft\">The first {shown} of {all}.")?;
            if nodes.len() < NODES_MAX {
                let more = Limit::near((nodes.len() * 20).max(1_000));
                let more = self.address(|query| query.limit = Some(more));
                write!(out, " <a href=\"{more}\">More</a>")?;
            }
            out.write_str("</p>\n")?;
        }
        out.write_str("</div>\n")
    }

    fn form(&self, out: &mut String) -> fmt::Result {
        out.write_str(
            "<form action=\"/#nodes\" method=\"get\">\n<label>State <select name=\"state\">",
        )?;
        for which in Which::ALL {
            let selected = if self.query.state == which { " selected" } else { "" };
            write!(out, "<option{selected}>{}</option>", which.word())?;
        }
        write!(
            out,
            "</select></label>\n\
             <label>Name has <input name=\"name\" type=\"search\" value=\"{}\" autocapitalize=\"none\" autocomplete=\"off\" \
             autocorrect=\"off\" spellcheck=\"false\"></label>\n<label>Sort by <select name=\"sort\">",
            Html(&self.query.name)
        )?;
        for (sort, words) in [
            (Sort::Name, "name"),
            (Sort::Failures, "most failures"),
            (Sort::Next, "next try"),
            (Sort::Seen, "longest unseen"),
        ] {
            let selected = if self.query.sort == sort { " selected" } else { "" };
            write!(out, "<option value=\"{}\"{selected}>{words}</option>", sort.word())?;
        }
        out.write_str("</select></label>\n<button>Show</button>\n</form>\n")
    }

    fn table(&self, out: &mut String) -> fmt::Result {
        out.write_str("<table class=\"nodes\"><thead><tr>")?;
        for (name, sort, class) in [
            ("Node", Some(Sort::Name), ""),
            ("State", None, ""),
            ("Why", None, ""),
            ("Failures", Some(Sort::Failures), " class=\"n\""),
            ("Next try", Some(Sort::Next), " class=\"n\""),
            ("Seen", Some(Sort::Seen), " class=\"n\""),
        ] {
            match sort {
                Some(sort) if sort == self.query.sort => {
                    let order = if sort == Sort::Failures || sort == Sort::Seen {
                        "descending"
                    } else {
                        "ascending"
                    };
                    write!(out, "<th{class} aria-sort=\"{order}\">{name}</th>")?;
                }
                Some(sort) => {
                    let address = self.address(|query| query.sort = sort);
                    write!(out, "<th{class}><a href=\"{address}\">{name}</a></th>")?;
                }
                None => write!(out, "<th{class}>{name}</th>")?,
            }
        }
        out.write_str("</tr></thead>\n<tbody>\n")?;
        for node in &self.nodes.nodes {
            row(out, node)?;
        }
        out.write_str("</tbody></table>\n")
    }

    /// What each worker does and since when.
    fn working(&self, out: &mut String) -> fmt::Result {
        out.write_str("<section id=\"working\" data-live><h2>Working now</h2>\n")?;
        if self.status.workers.is_empty() {
            return out.write_str("<p class=\"card\">Nobody is being worked on.</p></section>\n");
        }
        out.write_str(
            "<table class=\"working\"><thead><tr><th>Node</th><th>Step</th><th class=\"n\">For</th><th class=\"n\">In all</th>\
             <th class=\"n\">Attempt</th></tr></thead>\n<tbody>\n",
        )?;
        for Worker { node, attempt, for_secs, step, step_secs } in &self.status.workers {
            let step = step.as_deref().unwrap_or("begins");
            writeln!(
                out,
                "<tr><td class=\"node\">{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{attempt}</td></tr>",
                Html(node),
                Html(step),
                Span(*step_secs),
                Span(*for_secs)
            )?;
        }
        out.write_str("</tbody></table></section>\n")
    }

    fn outcomes(&self, out: &mut String) -> fmt::Result {
        out.write_str("<section id=\"outcomes\" data-live><h2>Last outcomes</h2>\n")?;
        let outcomes = &self.status.outcomes;
        if outcomes.is_empty() {
            return out.write_str("<p class=\"card\">None yet.</p></section>\n");
        }
        let (first, rest) = outcomes.split_at(outcomes.len().min(OUTCOMES_SHOWN));
        outcome_table(out, first)?;
        if !rest.is_empty() {
            writeln!(out, "<details id=\"older\"><summary>{} older</summary>", rest.len())?;
            outcome_table(out, rest)?;
            out.write_str("</details>")?;
        }
        out.write_str("</section>\n")
    }

    fn facts(&self, out: &mut String) -> fmt::Result {
        let Status { settings, broker, peers, discovery, helper, tokens, .. } = self.status;
        let Status { denied, counts, instance, pid, election, .. } = self.status;
        out.write_str("<section id=\"facts\" data-live><h2>Connections</h2>\n<dl class=\"facts card\">\n<dt>Broker</dt><dd>")?;
        match &broker.server {
            Some(server) => write!(out, "{} for {}", Html(server), Span(broker.for_secs))?,
            None => write!(out, "none for {}", Span(broker.for_secs))?,
        }
        if broker.reconnects > 0 {
            write!(out, ", connected again {} times", Number(broker.reconnects))?;
        }
        if let Some(error) = &broker.last_error {
            let ago = Span(error.ago_secs);
            write!(out, "<br><small>{ago} ago: {}</small>", Html(&error.text))?;
        }
        out.write_str("</dd>\n")?;
        if let Some(words) = election.words() {
            writeln!(out, "<dt>Election</dt><dd>{words}</dd>")?;
        }
        if let Some(Peers { part, share, others }) = peers {
            write!(out, "<dt>Share</dt><dd>{}: {:.0} %", part.words(), share * 100.0)?;
            for Peer { identity, instance, role, heard_secs, .. } in others {
                write!(
                    out,
                    "<br>{} <small>{}, heard {} ago, instance {}</small>",
                    Html(identity),
                    Html(role),
                    Span(*heard_secs),
                    Html(instance)
                )?;
            }
            out.write_str("</dd>\n")?;
        }
        out.write_str("<dt>Discovery</dt><dd>")?;
        match discovery.last_secs {
            Some(ago) => write!(out, "{} ago, {} nodes answered", Span(ago), discovery.replies)?,
            None => out.write_str("none has succeeded yet")?,
        }
        writeln!(
            out,
            "<br><small>every {}, {} failed</small></dd>",
            Span(discovery.interval_secs),
            Number(discovery.errors)
        )?;
        write!(
            out,
            "<dt>Helper</dt><dd>{} runs, {} failed",
            Number(helper.runs),
            Number(helper.errors)
        )?;
        if helper.processes > 0 {
            write!(out, ", {} processes", helper.processes)?;
        }
        if let Some(failure) = &helper.last_failure {
            write!(
                out,
                "<br><small>{} ago: {}</small>",
                Span(failure.ago_secs),
                Html(&failure.text)
            )?;
        }
        out.write_str("</dd>\n")?;
        for token in tokens {
            let left = match token.left_secs {
                left if left > 0 => format!("expires in {}", Span(left as f64)),
                left => format!("expired {} ago", Span(-left as f64)),
            };
            let (name, expires) = (Html(&token.token), Html(&token.expires));
            writeln!(out, "<dt>Token</dt><dd>{name}: {left} <small>({expires})</small></dd>")?;
        }
        if counts.denied > 0 {
            write!(out, "<dt>Denied</dt><dd>{}: ", Number(counts.denied as u64))?;
            for (place, each) in denied.iter().enumerate() {
                write!(out, "{}{}", if place > 0 { ", " } else { "" }, Html(&each.node))?;
            }
            out.write_str("</dd>\n")?;
        }
        writeln!(out, "<dt>Settings</dt><dd>read {} ago</dd>", Span(settings.read_secs))?;
        write!(
            out,
            "<dt>Process</dt><dd>{pid} <small>instance {}</small></dd>\n</dl></section>\n",
            Html(instance)
        )
    }

    fn footer(&self, out: &mut String) -> fmt::Result {
        let again = self.address(|_| ());
        writeln!(
            out,
            "<footer><span id=\"as-of\" data-live>As of {}.</span> <span id=\"how\"><a href=\"{again}\">Refresh</a></span> \
             <a href=\"/status.json\">status.json</a> · <a href=\"/metrics\">metrics</a> · <a href=\"/readyz\">readyz</a></footer>",
            Html(&self.status.time)
        )
    }

    /// The address of this page with another query, ready for an attribute.
    fn address(&self, change: impl FnOnce(&mut Query)) -> String {
        let mut query = self.query.clone();
        change(&mut query);
        let mut fields = Serializer::new(String::new());
        fields.append_pair("state", query.state.word());
        if !query.name.is_empty() {
            fields.append_pair("name", &query.name);
        }
        fields.append_pair("sort", query.sort.word());
        if let Some(limit) = query.limit.filter(|limit| *limit != NODES_SHOWN) {
            fields.append_pair("limit", &limit.get().to_string());
        }
        Html(&format!("/?{}#nodes", fields.finish())).to_string()
    }
}

fn row(out: &mut String, node: &Listed) -> fmt::Result {
    let Listed { node, state, for_secs, next_secs, seen_secs, failures, reason, .. } = node;
    write!(out, "<tr><td class=\"node\">{}</td><td>{}", Html(node), Html(state))?;
    if let Some(time) = for_secs {
        write!(out, " for {}", Span(*time))?;
    }
    let brief = without_middle(reason);
    match brief == *reason {
        true => out.write_str("</td><td>")?,
        false => write!(out, "</td><td title=\"{}\">", Html(reason))?,
    }
    write!(out, "{}</td><td class=\"n\">{failures}</td><td class=\"n\">", Html(&brief))?;
    match next_secs {
        // It waits to be seen: by the next discovery, or its next event.
        Some(0.0) => out.write_str("when seen")?,
        Some(time) => write!(out, "in {}", Span(*time))?,
        None => {}
    }
    writeln!(out, "</td><td class=\"n\">{} ago</td></tr>", Span(*seen_secs))
}

fn outcome_table(out: &mut String, outcomes: &[Outcome]) -> fmt::Result {
    out.write_str(
        "<table class=\"outcomes\"><thead><tr><th class=\"n\">Ago</th><th>Node</th><th>Outcome</th><th class=\"n\">Took</th>\
         <th class=\"n\">Attempt</th></tr></thead>\n<tbody>\n",
    )?;
    for Outcome { ago_secs, node, outcome, reason, attempt, took_secs } in outcomes {
        let class = match outcome.as_str() {
            "provisioned" | "upgrade_sent" | "shutdown" => "ok",
            "deferred" | "busy" | "not_provisioning" => "idle",
            _ => "bad",
        };
        writeln!(
            out,
            "<tr><td class=\"n\">{}</td><td class=\"node\">{}</td><td><span class=\"tag {class}\">{}</span> {}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{attempt}</td></tr>",
            Span(*ago_secs),
            Html(node),
            Html(outcome),
            Html(reason),
            Span(*took_secs)
        )?;
    }
    out.write_str("</tbody></table>\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::status::testing;

    fn asked(text: &str) -> Query {
        query(text).unwrap()
    }

    fn page(status: &Status, query: &Query, nodes: Vec<Listed>) -> String {
        render(status, &Nodes { matching: nodes.len() + 3, nodes }, query)
    }

    #[test]
    fn shows_what_there_is_in_words() {
        let nodes = vec![testing::stuck("broken.example.net", "could not fetch CSR")];
        let text = page(&testing::status(), &asked(""), nodes);
        for part in [
            "<title>paused by an operator – provisioner.example.net</title>",
            "<h1>paused by an operator</h1>",
            "for 3 min 21 s · provisioner.example.net · site lon · version 0.1.0 · up 1 d 1 h",
            "<li class=\"bad\">paused by an operator</li>",
            "Queued <b>1,234</b><small>100 asked, 3 ready</small>",
            "Working <b>1</b><small>of 8 workers</small>",
            "Provisioned <b>12.5 <small>a minute</small></b><small>12.5 in 5 min, 12.5 in 15 min, 54,321 in all</small>",
            "<td class=\"node\">broken.example.net</td><td>waiting</td><td>could not fetch CSR</td>",
            "<td class=\"n\">in 3 min 20 s</td><td class=\"n\">12 s ago</td>",
            "The first 1 of 4.",
            "<td class=\"node\">busy.example.net</td><td>helper</td><td class=\"n\">31 s</td>",
            "<span class=\"tag bad\">failed</span> no space left on device",
            "nats://broker.example.net:4222 for 1 h, connected again 2 times",
            "1 min 15 s ago: connection reset",
            "12 s ago, 40 nodes answered",
            "signing: expires in 30 d 21 h",
            "<dt>Denied</dt><dd>1: denied.example.net</dd>",
            "As of 2026-03-01T02:03:04.005Z.",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn says_so_when_nothing_is_stuck() {
        let text = render(&testing::status(), &Nodes::default(), &asked(""));
        assert!(text.contains("No node is stuck."));
        let text = render(&testing::status(), &Nodes::default(), &asked("name=x"));
        assert!(text.contains("None.") && !text.contains("No node is stuck."));
    }

    #[test]
    fn nothing_that_others_wrote_becomes_a_part_of_the_page() {
        let nasty = "\"><script>alert('x')</script>&amp;";
        // Every text, whichever there are.
        let mut document = serde_json::to_value(testing::status()).unwrap();
        replace_texts(&mut document, nasty);
        document["state"] = "provisioning".into();
        document["election"] = "off".into();
        document["peers"]["part"] = "acting".into();
        let status: Status = serde_json::from_value(document).unwrap();
        let mut node = testing::stuck(nasty, nasty);
        node.state = nasty.into();
        let query = Query { name: nasty.into(), ..asked("") };
        let text = page(&status, &query, vec![node]);
        let escaped = "&quot;&gt;&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;amp;";
        assert_eq!(text.matches(escaped).count(), 25, "each where it is shown, the identity twice");
        assert_eq!(text.matches("<script>").count(), 1, "ours");
        assert!(!text.contains("alert('"));
    }

    fn replace_texts(value: &mut serde_json::Value, with: &str) {
        match value {
            serde_json::Value::String(text) => with.clone_into(text),
            serde_json::Value::Array(values) => {
                values.iter_mut().for_each(|value| replace_texts(value, with));
            }
            serde_json::Value::Object(fields) => {
                fields.values_mut().for_each(|value| replace_texts(value, with));
            }
            _ => {}
        }
    }

    #[test]
    fn a_wish_that_makes_no_sense_is_said_and_not_ignored() {
        for (text, expected) in [
            ("state=asleep", "state: found \"asleep\", wanted one of all, stuck, working, "),
            ("sort=%1b", "sort: found \"\\u{1b}\", wanted one of name, failures, "),
            ("limit=0", "limit: found \"0\", wanted a number from 1 to 10000"),
            ("limit=10001", "limit: found \"10001\", wanted a number from 1 to 10000"),
            ("limit=many", "limit: found \"many\", wanted a number from 1 to 10000"),
            ("nmae=web", "found \"nmae\", wanted state, name, sort or limit"),
            ("name=web&%1b", "found \"\\u{1b}\", wanted state, name, sort or limit"),
        ] {
            let error = query(text).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
        assert_eq!(asked("state=&sort=&limit=&name=&&="), asked(""));
    }

    #[test]
    fn its_own_addresses_lead_back_to_the_same_query() {
        let query = asked("state=waiting&name=a%26b+%22&sort=failures&limit=1000");
        let text = page(&testing::status(), &query, vec![testing::stuck("a", "b")]);
        let address = "/?state=waiting&amp;name=a%26b+%22&amp;sort=seen&amp;limit=1000#nodes";
        assert!(text.contains(&format!("<a href=\"{address}\">Seen</a>")), "{text}");
        assert!(text.contains("<option selected>waiting</option>"));
        assert!(text.contains("<option value=\"failures\" selected>"));
        assert!(text.contains("aria-sort=\"descending\">Failures</th>"));
    }

    #[test]
    fn ten_thousand_nodes_make_a_page_of_a_few_megabytes() {
        let nodes = (0..10_000).map(|n| {
            testing::stuck(
                &format!("n{n}.some.long.domain.example.net"),
                "could not fetch and validate JWT: no answer",
            )
        });
        let text = page(&testing::status(), &asked("limit=10000"), nodes.collect());
        assert_eq!(text.matches("<td class=\"node\">").count(), 10_000 + 2);
        assert!(text.len() < 4_000_000, "{} bytes", text.len());
    }

    #[test]
    fn the_policy_names_the_style_and_script_that_are_served() {
        let text = page(&testing::status(), &asked(""), Vec::new());
        for (open, close) in [("<style>", "</style>"), ("<script>", "</script>")] {
            let start = text.find(open).unwrap() + open.len();
            let end = start + text[start..].find(close).unwrap();
            let hash = STANDARD.encode(sha256(&text.as_bytes()[start..end]));
            assert!(policy().contains(&format!("'sha256-{hash}'")), "{open}");
        }
        assert!(!STYLE.contains("url(") && !STYLE.contains("@import"));
        let is_inline =
            |tag: &&str| [" style=", " onclick=", " onload="].iter().any(|name| tag.contains(name));
        let attributes = text.split(['<', '>']).filter(is_inline);
        assert_eq!(attributes.collect::<Vec<_>>(), [""; 0], "inline ones would not work");
    }
}
