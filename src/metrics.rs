//! Every metric: name, labels, help text.
//!
//! The first group are the metrics of the Go provisioner with its names, types, help texts and labels, so that the
//! published dashboard keeps working; their counters have no `_total`. The second group is our own and follows
//! Prometheus' rules. All carry the label `site`. Series with only that label exist from the start, at zero;
//! `rpc_time` and `rpc_errors` appear together with the first call of their action, since the dashboard draws a line for each.
//!
//! Others count; this module only keeps and prints. A field is named as its metric, without prefix and `_total`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::core::{Collector, Desc};
use prometheus::proto;
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, TextEncoder,
};

use crate::protocol::election::ELECTION;

/// The `Content-Type` of what [`Metrics::render`] returns.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Every metric of the process.
pub struct Metrics {
    registry: Registry,
    calls: Calls,

    /// Nodes being provisioned.
    pub busy_workers: IntGauge,
    /// Discoveries begun.
    pub discover_cycles: IntCounter,
    /// Nodes newly known through a discovery.
    pub discovered: IntCounter,
    /// Discoveries failed.
    pub discovery_errors: IntCounter,
    /// Nodes newly known through a startup event.
    pub event_discovered: IntCounter,
    /// Helper runs failed.
    pub helper_errors: IntCounter,
    /// Nodes that agreed to shut down on the helper's wish.
    pub helper_shutdown_requests: IntCounter,
    /// Time of each helper run.
    pub helper_time: Summary,
    /// 1 while an operator has paused us or another instance provisions: the reasons the original knew.
    pub paused: IntGauge,
    /// Attempts ended with an error.
    pub provision_errors: IntCounter,
    /// Attempts ended well.
    pub provisioned: IntCounter,
    /// Nodes queued, in work or settling.
    pub waiting_nodes: IntGauge,
    /// Nodes on the work queue.
    pub work_queue_entries: IntGauge,

    /// Attempts by `outcome`.
    pub outcomes: IntCounterVec,
    /// Seconds by `step`.
    pub step_duration_seconds: HistogramVec,
    /// Seconds of an attempt from the worker's start to its end.
    pub node_duration_seconds: Histogram,
    /// Seconds from the queue to a worker.
    pub queue_wait_seconds: Histogram,
    /// Nodes left alone until their next try is due.
    pub waiting_retry_nodes: IntGauge,
    /// Nodes left alone after an attempt that ended well.
    pub settling_nodes: IntGauge,
    /// Nodes that answered the probe and wait for a worker.
    pub ready_nodes: IntGauge,
    /// Probes sent and unanswered.
    pub probes_outstanding: IntGauge,
    /// 1 for each `reason` not to act that holds.
    pub gate_closed: IntGaugeVec,
    /// 1 while connected to a broker.
    pub broker_connected: IntGauge,
    /// Connections made after the first.
    pub broker_reconnects: IntCounter,
    /// Errors of the connection by `kind`.
    pub broker_errors: IntCounterVec,
    /// Replies dropped by `kind`.
    pub unexpected_replies: IntCounterVec,
    /// Identities refused for their syntax.
    pub invalid_identities: IntCounter,
    /// Lifecycle events dropped by `kind`.
    pub events_ignored: IntCounterVec,
    /// Nodes that came back unprovisioned soon after they were configured.
    pub returns: IntCounter,
    /// Nodes a full `queue` had no place for.
    pub queue_refused: IntCounterVec,
    /// Unix time of the end of the last good discovery, in seconds.
    pub last_discovery_timestamp_seconds: IntGauge,
    /// Replies to the last discovery.
    pub discovery_replies: IntGauge,
    /// Connections and requests the monitor port turned away, by `reason`.
    pub monitor_refused: IntCounterVec,
    /// Lines of the audit log that were not written.
    pub audit_lines_lost: IntCounter,
    /// Helper processes that stay from node to node.
    pub helper_processes: IntGauge,
    /// Such processes started in the place of one that failed.
    pub helper_restarts: IntCounter,
    /// 1 if the last reload took effect, 0 if it was refused.
    pub config_last_reload_successful: IntGauge,
    /// Unix time at which the settings in force were read, in seconds.
    pub config_last_reload_timestamp_seconds: IntGauge,
    /// Other instances that share the nodes.
    pub peers: IntGauge,
    /// Our part of the nodes.
    pub share_ratio: Gauge,
    /// Messages from peers dropped by `kind`.
    pub peer_messages_ignored: IntCounterVec,
    /// 1 while we lead the election.
    pub leader: IntGauge,
    lease: Lease,
    /// Writes to the election's key by `election`, `identity` and `state`, as the original's.
    election_campaigns: IntCounterVec,
    /// The original's `leader`.
    election_leader: IntGaugeVec,
    /// Seconds from one write to the next.
    election_interval_seconds: GaugeVec,
    /// Unix time at which a `token` of ours expires, in seconds: `signing` is the one server JWTs hang on.
    pub token_expiry_timestamp_seconds: IntGaugeVec,
}

impl Metrics {
    /// Metrics with a registry of their own, all labelled with `site`.
    pub fn new(site: &str) -> Arc<Metrics> {
        let make = Make { registry: Registry::new(), site };
        let calls = Calls::default();
        make.register(CallsCollector::new(&make, calls.clone()));
        let metrics = Metrics {
            busy_workers: make.gauge("busy_workers", "How many workers are busy provisioning nodes"),
            discover_cycles: make.counter("discover_cycles", "How many discovery cycles were ran"),
            discovered: make.counter("discovered", "How many nodes were found through discovery"),
            discovery_errors: make.counter(
                "discovery_errors",
                "How many discovery related errors were encountered",
            ),
            event_discovered: make.counter(
                "event_discovered",
                "How many nodes were found through receiving an event about them",
            ),
            helper_errors: make
                .counter("helper_errors", "How many helper related errors were encountered"),
            helper_shutdown_requests: make.counter(
                "helper_shutdown_requests",
                "Host many times the helper asked for a node to be shutdown and it succeeded",
            ),
            helper_time: make.summary("helper_time", "How long it took to run the helper"),
            paused: make.gauge("paused", "Indicates if the provisioner is paused"),
            provision_errors: make
                .counter("provision_errors", "How many provision related errors were encountered"),
            provisioned: make
                .counter("provisioned", "How many nodes were successfully provisioned"),
            waiting_nodes: make.gauge(
                "waiting_nodes",
                "The number of nodes currently waiting to be provisioned",
            ),
            work_queue_entries: make.gauge(
                "work_queue_entries",
                "Number of nodes on the work queue waiting to be provisioned",
            ),

            outcomes: make.counters(
                "outcomes_total",
                "Attempts to provision a node, by what became of them",
                "outcome",
            ),
            step_duration_seconds: make.histograms(
                "step_duration_seconds",
                "Time taken by each step of an attempt, retries included",
                "step",
                STEP_BUCKETS,
            ),
            node_duration_seconds: make.histogram(
                "node_duration_seconds",
                "Time a worker spent on a node, from its first step to the outcome",
                STEP_BUCKETS,
            ),
            queue_wait_seconds: make.histogram(
                "queue_wait_seconds",
                "Time a node waited between being queued and being taken by a worker",
                QUEUE_BUCKETS,
            ),
            waiting_retry_nodes: make.gauge(
                "waiting_retry_nodes",
                "Nodes whose last attempt did not succeed and whose next one is not due or not yet queued",
            ),
            settling_nodes: make.gauge(
                "settling_nodes",
                "Nodes left alone for a while after an attempt that ended well",
            ),
            ready_nodes: make.gauge(
                "ready_nodes",
                "Nodes that answered the probe and wait for a worker",
            ),
            probes_outstanding: make
                .gauge("probes_outstanding", "Nodes that were probed and have not answered yet"),
            gate_closed: make.gauges(
                "gate_closed",
                "Reasons not to provision, 1 while a reason holds",
                "reason",
            ),
            broker_connected: make
                .gauge("broker_connected", "1 while there is a connection to a broker, otherwise 0"),
            broker_reconnects: make.counter(
                "broker_reconnects_total",
                "Connections to a broker that were made after an earlier one was lost",
            ),
            broker_errors: make.counters(
                "broker_errors_total",
                "Errors of the connection to the broker, by their kind",
                "kind",
            ),
            unexpected_replies: make.counters(
                "unexpected_replies_total",
                "Replies that were dropped because nobody waited for them or a check refused them",
                "kind",
            ),
            invalid_identities: make.counter(
                "invalid_identities_total",
                "Nodes refused because their identity has an invalid form",
            ),
            events_ignored: make.counters(
                "events_ignored_total",
                "Lifecycle events that did not lead to a node, by the reason",
                "kind",
            ),
            returns: make.counter(
                "returns_total",
                "Nodes that came back unprovisioned soon after they were configured",
            ),
            queue_refused: make.counters(
                "queue_refused_total",
                "Nodes that found a queue full and have to be seen again",
                "queue",
            ),
            last_discovery_timestamp_seconds: make.gauge(
                "last_discovery_timestamp_seconds",
                "Unix time at which the last successful discovery ended, 0 before the first",
            ),
            discovery_replies: make
                .gauge("discovery_replies", "How many replies the last discovery received"),
            monitor_refused: make.counters(
                "monitor_refused_total",
                "Connections and requests to the monitor port that were turned away",
                "reason",
            ),
            audit_lines_lost: make.counter(
                "audit_lines_lost_total",
                "Lines of the audit log that could not be written, or not fast enough",
            ),
            helper_processes: make.gauge(
                "helper_processes",
                "Helper processes that run, when they are not started for each node",
            ),
            helper_restarts: make.counter(
                "helper_restarts_total",
                "Helper processes started in the place of one that failed or ended",
            ),
            config_last_reload_successful: make.gauge(
                "config_last_reload_successful",
                "1 if the settings last read, at the start or by a reload, are in force, 0 if they were refused",
            ),
            config_last_reload_timestamp_seconds: make.gauge(
                "config_last_reload_timestamp_seconds",
                "Unix time at which the settings in force were read",
            ),
            peers: make.gauge(
                "peers",
                "Other instances that share the nodes with this one and were heard a moment ago",
            ),
            share_ratio: make.ratio(
                "share_ratio",
                "This instance's part of the nodes that the instances share, 0 while it has none and if they share none",
            ),
            peer_messages_ignored: make.counters(
                "peer_messages_ignored_total",
                "Messages on the subject of the instances that counted for nothing, by the reason",
                "kind",
            ),
            leader: make
                .gauge("leader", "1 while this instance leads the election, 0 without an election"),
            lease: make.lease(),
            election_campaigns: make.register(
                IntCounterVec::new(
                    Opts::new(
                        "choria_election_campaigns",
                        "The number of campaigns a specific candidate voted in",
                    ),
                    &["election", "identity", "state"],
                )
                .expect(VALID),
            ),
            election_leader: make.register(
                IntGaugeVec::new(
                    Opts::new(
                        "choria_election_leader",
                        "Indicates if a specific instance is the current leader",
                    ),
                    &["election", "identity"],
                )
                .expect(VALID),
            ),
            election_interval_seconds: make.register(
                GaugeVec::new(
                    Opts::new(
                        "choria_election_interval_seconds",
                        "The number of seconds between campaigns",
                    ),
                    &["election", "identity"],
                )
                .expect(VALID),
            ),
            token_expiry_timestamp_seconds: make.gauges(
                "token_expiry_timestamp_seconds",
                "Unix time at which a token of the provisioner expires",
                "token",
            ),
            calls,
            registry: make.registry.clone(),
        };
        make.build_info();
        Arc::new(metrics)
    }

    /// Records the time of one try of an RPC; `action` is a label such as `choria_provision#jwt`.
    pub fn rpc_time(&self, action: &'static str, time: Duration) {
        let mut calls = self.calls.0.lock();
        let call = calls.entry(action).or_default();
        call.tries += 1;
        call.seconds += time.as_secs_f64();
    }

    /// Counts an RPC that was given up.
    pub fn rpc_error(&self, action: &'static str) {
        self.calls.0.lock().entry(action).or_default().errors += 1;
    }

    /// Counts a write to the election's key by who we are, and when the next is due.
    pub fn campaign(&self, identity: &str, state: &str, interval: Duration) {
        self.election_campaigns.with_label_values(&[ELECTION, identity, state]).inc();
        self.election_interval_seconds
            .with_label_values(&[ELECTION, identity])
            .set(interval.as_secs_f64());
    }

    /// Notes whether we lead.
    pub fn lead(&self, identity: &str, leads: bool) {
        self.leader.set(i64::from(leads));
        self.election_leader.with_label_values(&[ELECTION, identity]).set(i64::from(leads));
    }

    /// Whom to ask how much is left of the lease; without, there is none.
    pub fn lease_from(&self, left: impl Fn() -> Duration + Send + Sync + 'static) {
        *self.lease.left.lock() = Some(Box::new(left));
    }

    /// Notes when a token of ours expires, in seconds since 1970; `token` says which.
    pub fn token_expires(&self, token: &str, at: i64) {
        self.token_expiry_timestamp_seconds.with_label_values(&[token]).set(at);
    }

    /// There is no such token any more.
    pub fn no_token(&self, token: &str) {
        // Of one that never was there is nothing to remove.
        let _ = self.token_expiry_timestamp_seconds.remove_label_values(&[token]);
    }

    /// What [`Metrics::token_expires`] was told last, by token.
    pub fn token_expiries(&self) -> Vec<(String, i64)> {
        let families = self.token_expiry_timestamp_seconds.collect();
        let series = families.iter().flat_map(proto::MetricFamily::get_metric);
        let mut expiries: Vec<(String, i64)> = series
            .filter_map(|metric| {
                let label = metric.get_label().iter().find(|label| label.name() == "token")?;
                // A whole number that was written as one.
                Some((label.value().to_owned(), metric.get_gauge().get_value() as i64))
            })
            .collect();
        expiries.sort();
        expiries
    }

    /// All metrics in text format 0.0.4, families sorted by name.
    pub fn render(&self) -> String {
        let mut text = String::new();
        if let Err(error) = TextEncoder::new().encode_utf8(&self.registry.gather(), &mut text) {
            // What was written before is still of use, and a monitor must not end the process.
            log::error!(component = "metrics"; "Could not write the metrics: {error}");
        }
        text
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

/// Count and sum of observed times; the prometheus crate has no summary.
#[derive(Debug, Clone)]
pub struct Summary {
    desc: Desc,
    cell: Arc<SummaryCell>,
}

#[derive(Debug, Default)]
struct SummaryCell {
    count: AtomicU64,
    // Nanoseconds in 64 bits last for 584 years.
    nanos: AtomicU64,
}

impl Summary {
    /// Adds one observation.
    pub fn observe(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.cell.nanos.fetch_add(nanos, Ordering::Relaxed);
        self.cell.count.fetch_add(1, Ordering::Relaxed);
    }

    /// How many observations there were.
    pub fn count(&self) -> u64 {
        self.cell.count.load(Ordering::Relaxed)
    }
}

impl Collector for Summary {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<proto::MetricFamily> {
        let seconds = Duration::from_nanos(self.cell.nanos.load(Ordering::Relaxed)).as_secs_f64();
        vec![family(
            &self.desc,
            proto::MetricType::SUMMARY,
            vec![summary(&self.desc, None, self.count(), seconds)],
        )]
    }
}

type Left = Box<dyn Fn() -> Duration + Send + Sync>;

/// Prints what is left of the lease at that moment.
#[derive(Clone)]
struct Lease {
    desc: Desc,
    left: Arc<Mutex<Option<Left>>>,
}

impl Collector for Lease {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<proto::MetricFamily> {
        let left = self.left.lock().as_ref().map_or(Duration::ZERO, |left| left());
        let mut gauge = proto::Gauge::default();
        gauge.set_value(left.as_secs_f64());
        let mut metric = proto::Metric::default();
        metric.set_label(labels(&self.desc, None));
        metric.set_gauge(gauge);
        vec![family(&self.desc, proto::MetricType::GAUGE, vec![metric])]
    }
}

/// Times and errors of the RPC actions; one short lock, taken once a try.
#[derive(Debug, Clone, Default)]
struct Calls(Arc<Mutex<BTreeMap<&'static str, Call>>>);

#[derive(Debug, Default, Clone, Copy)]
struct Call {
    tries: u64,
    seconds: f64,
    errors: u64,
}

/// Prints `rpc_time` and `rpc_errors` for every action that was called.
#[derive(Clone)]
struct CallsCollector {
    time: Desc,
    errors: Desc,
    calls: Calls,
}

impl CallsCollector {
    fn new(make: &Make<'_>, calls: Calls) -> CallsCollector {
        CallsCollector {
            time: make.desc("rpc_time", "How long it took to perform RPC requests", &[RPC]),
            errors: make.desc("rpc_errors", "How many rpc related errors were encountered", &[RPC]),
            calls,
        }
    }
}

impl Collector for CallsCollector {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.time, &self.errors]
    }

    fn collect(&self) -> Vec<proto::MetricFamily> {
        let calls = self.calls.0.lock().clone();
        let (mut times, mut errors) = (Vec::new(), Vec::new());
        for (action, call) in calls {
            times.push(summary(&self.time, Some(action), call.tries, call.seconds));
            let mut counter = proto::Counter::default();
            counter.set_value(call.errors as f64);
            let mut metric = proto::Metric::default();
            metric.set_label(labels(&self.errors, Some(action)));
            metric.set_counter(counter);
            errors.push(metric);
        }
        vec![
            family(&self.time, proto::MetricType::SUMMARY, times),
            family(&self.errors, proto::MetricType::COUNTER, errors),
        ]
    }
}

fn family(
    desc: &Desc,
    kind: proto::MetricType,
    metrics: Vec<proto::Metric>,
) -> proto::MetricFamily {
    let mut family = proto::MetricFamily::default();
    family.set_name(desc.fq_name.clone());
    family.set_help(desc.help.clone());
    family.set_field_type(kind);
    family.set_metric(metrics);
    family
}

fn summary(desc: &Desc, action: Option<&str>, count: u64, seconds: f64) -> proto::Metric {
    let mut summary = proto::Summary::default();
    summary.set_sample_count(count);
    summary.set_sample_sum(seconds);
    let mut metric = proto::Metric::default();
    metric.set_label(labels(desc, action));
    metric.set_summary(summary);
    metric
}

/// The constant labels of `desc` and, before them in the alphabet, the action.
fn labels(desc: &Desc, action: Option<&str>) -> Vec<proto::LabelPair> {
    let action = action.map(|action| {
        let mut pair = proto::LabelPair::default();
        pair.set_name(RPC.to_owned());
        pair.set_value(action.to_owned());
        pair
    });
    action.into_iter().chain(desc.const_label_pairs.iter().cloned()).collect()
}

/// Makes metrics and enters them into the registry.
struct Make<'a> {
    registry: Registry,
    site: &'a str,
}

impl Make<'_> {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(format!("{PREFIX}{name}"), help).const_label("site", self.site)
    }

    fn desc(&self, name: &str, help: &str, labels: &[&str]) -> Desc {
        let opts = self
            .opts(name, help)
            .variable_labels(labels.iter().map(|&label| label.to_owned()).collect());
        prometheus::core::Describer::describe(&opts).expect(VALID)
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.register(IntCounter::with_opts(self.opts(name, help)).expect(VALID))
    }

    fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.register(IntGauge::with_opts(self.opts(name, help)).expect(VALID))
    }

    fn ratio(&self, name: &str, help: &str) -> Gauge {
        self.register(Gauge::with_opts(self.opts(name, help)).expect(VALID))
    }

    fn counters(&self, name: &str, help: &str, label: &str) -> IntCounterVec {
        self.register(IntCounterVec::new(self.opts(name, help), &[label]).expect(VALID))
    }

    fn gauges(&self, name: &str, help: &str, label: &str) -> IntGaugeVec {
        self.register(IntGaugeVec::new(self.opts(name, help), &[label]).expect(VALID))
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let opts = HistogramOpts::from(self.opts(name, help)).buckets(buckets.to_vec());
        self.register(Histogram::with_opts(opts).expect(VALID))
    }

    fn histograms(&self, name: &str, help: &str, label: &str, buckets: &[f64]) -> HistogramVec {
        let opts = HistogramOpts::from(self.opts(name, help)).buckets(buckets.to_vec());
        self.register(HistogramVec::new(opts, &[label]).expect(VALID))
    }

    fn lease(&self) -> Lease {
        let help = "How long this instance may still act without another word from the broker, 0 while it may not and if it is alone";
        let desc = self.desc("lease_remaining_seconds", help, &[]);
        self.register(Lease { desc, left: Arc::default() })
    }

    fn summary(&self, name: &str, help: &str) -> Summary {
        let desc = self.desc(name, help, &[]);
        self.register(Summary { desc, cell: Arc::default() })
    }

    /// What runs, for dashboards to show; the value is always 1.
    fn build_info(&self) {
        let opts = self
            .opts("build_info", "The version that runs; always 1")
            .const_label("version", env!("CARGO_PKG_VERSION"))
            .const_label("revision", option_env!("CHORIA_PROVISIONER_REVISION").unwrap_or(""));
        self.register(IntGauge::with_opts(opts).expect(VALID)).set(1);
    }

    fn register<C: Collector + 'static + Clone>(&self, collector: C) -> C {
        self.registry.register(Box::new(collector.clone())).expect(VALID);
        collector
    }
}

const PREFIX: &str = "choria_provisioner_";

/// The label of the RPC metrics.
const RPC: &str = "rpc";

/// Why making a metric can't fail: names and labels are literals of this file, and a test makes them all.
const VALID: &str = "names are valid and used once";

/// Seconds. From a broker on the same machine to a node that uses all its time.
const STEP_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
];

/// Seconds. From an idle daemon to a fleet that comes back all at once.
const QUEUE_BUCKETS: &[f64] =
    &[0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0];

#[cfg(test)]
mod tests {
    use super::*;

    /// Name, type and help text of every metric of the original.
    const ORIGINAL: &[(&str, &str, &str)] = &[
        ("busy_workers", "gauge", "How many workers are busy provisioning nodes"),
        ("discover_cycles", "counter", "How many discovery cycles were ran"),
        ("discovered", "counter", "How many nodes were found through discovery"),
        ("discovery_errors", "counter", "How many discovery related errors were encountered"),
        (
            "event_discovered",
            "counter",
            "How many nodes were found through receiving an event about them",
        ),
        ("helper_errors", "counter", "How many helper related errors were encountered"),
        (
            "helper_shutdown_requests",
            "counter",
            "Host many times the helper asked for a node to be shutdown and it succeeded",
        ),
        ("helper_time", "summary", "How long it took to run the helper"),
        ("paused", "gauge", "Indicates if the provisioner is paused"),
        ("provision_errors", "counter", "How many provision related errors were encountered"),
        ("provisioned", "counter", "How many nodes were successfully provisioned"),
        ("rpc_errors", "counter", "How many rpc related errors were encountered"),
        ("rpc_time", "summary", "How long it took to perform RPC requests"),
        ("waiting_nodes", "gauge", "The number of nodes currently waiting to be provisioned"),
        (
            "work_queue_entries",
            "gauge",
            "Number of nodes on the work queue waiting to be provisioned",
        ),
    ];

    #[test]
    fn shows_every_metric_of_the_original_with_its_type_and_help() {
        let metrics = Metrics::new("lon");
        metrics.rpc_time("choria_provision#jwt", Duration::from_millis(1));
        let text = metrics.render();
        for (name, kind, help) in ORIGINAL {
            let head = format!(
                "# HELP choria_provisioner_{name} {help}\n# TYPE choria_provisioner_{name} {kind}\nchoria_provisioner_{name}"
            );
            assert!(text.contains(&head), "{head}\nis not in\n{text}");
        }
    }

    #[test]
    fn series_with_only_a_site_exist_at_zero_from_the_start() {
        let text = Metrics::new("lon").render();
        for (name, kind, _) in ORIGINAL {
            match *kind {
                _ if name.starts_with("rpc_") => {
                    assert!(!text.contains(name), "{name} before its first call in\n{text}");
                }
                "summary" => {
                    shows(&text, &format!("choria_provisioner_{name}_sum{{site=\"lon\"}} 0"));
                    shows(&text, &format!("choria_provisioner_{name}_count{{site=\"lon\"}} 0"));
                }
                _ => shows(&text, &format!("choria_provisioner_{name}{{site=\"lon\"}} 0")),
            }
        }
        shows(&text, "choria_provisioner_broker_reconnects_total{site=\"lon\"} 0");
        shows(&text, "choria_provisioner_queue_wait_seconds_bucket{site=\"lon\",le=\"0.01\"} 0");
        shows(&text, "choria_provisioner_queue_wait_seconds_count{site=\"lon\"} 0");
    }

    #[test]
    fn times_and_errors_of_an_action_appear_with_its_first_call() {
        let metrics = Metrics::new("lon");
        metrics.rpc_time("rpcutil#inventory", Duration::from_micros(12_300));
        metrics.rpc_time("choria_provision#jwt", Duration::from_millis(250));
        metrics.rpc_time("choria_provision#jwt", Duration::from_secs(2));
        metrics.rpc_error("choria_provision#jwt");
        let text = metrics.render();
        let errors = "\
            # HELP choria_provisioner_rpc_errors How many rpc related errors were encountered\n\
            # TYPE choria_provisioner_rpc_errors counter\n\
            choria_provisioner_rpc_errors{rpc=\"choria_provision#jwt\",site=\"lon\"} 1\n\
            choria_provisioner_rpc_errors{rpc=\"rpcutil#inventory\",site=\"lon\"} 0\n";
        let times = "\
            # HELP choria_provisioner_rpc_time How long it took to perform RPC requests\n\
            # TYPE choria_provisioner_rpc_time summary\n\
            choria_provisioner_rpc_time_sum{rpc=\"choria_provision#jwt\",site=\"lon\"} 2.25\n\
            choria_provisioner_rpc_time_count{rpc=\"choria_provision#jwt\",site=\"lon\"} 2\n\
            choria_provisioner_rpc_time_sum{rpc=\"rpcutil#inventory\",site=\"lon\"} 0.0123\n\
            choria_provisioner_rpc_time_count{rpc=\"rpcutil#inventory\",site=\"lon\"} 1\n";
        assert!(text.contains(errors), "{text}");
        assert!(text.contains(times), "{text}");
    }

    #[test]
    fn sums_helper_times_in_seconds() {
        let metrics = Metrics::new("lon");
        metrics.helper_time.observe(Duration::from_millis(1500));
        metrics.helper_time.observe(Duration::from_millis(750));
        let text = metrics.render();
        shows(&text, "choria_provisioner_helper_time_sum{site=\"lon\"} 2.25");
        shows(&text, "choria_provisioner_helper_time_count{site=\"lon\"} 2");
    }

    #[test]
    fn every_series_carries_the_site_and_families_are_sorted() {
        let metrics = Metrics::new("lon");
        metrics.outcomes.with_label_values(&["provisioned"]).inc();
        metrics.step_duration_seconds.with_label_values(&["jwt"]).observe(0.004);
        metrics.gate_closed.with_label_values(&["standby"]).set(1);
        for labelled in [
            &metrics.broker_errors,
            &metrics.unexpected_replies,
            &metrics.events_ignored,
            &metrics.queue_refused,
            &metrics.monitor_refused,
        ] {
            labelled.with_label_values(&["x"]).inc();
        }
        metrics.token_expires("x", 1);
        let text = metrics.render();
        let mut names = Vec::new();
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                names.push(help.split(' ').next().unwrap());
            } else if !line.starts_with('#') {
                assert!(line.contains("site=\"lon\""), "{line}");
            }
        }
        assert!(names.is_sorted(), "{names:?}");
        shows(&text, "choria_provisioner_outcomes_total{outcome=\"provisioned\",site=\"lon\"} 1");
        shows(&text, "choria_provisioner_gate_closed{reason=\"standby\",site=\"lon\"} 1");
    }

    #[test]
    fn escapes_a_site_with_quotes_backslashes_and_line_feeds() {
        let text = Metrics::new("a\"b\\c\nd").render();
        shows(&text, r#"choria_provisioner_paused{site="a\"b\\c\nd"} 0"#);
    }

    #[test]
    fn two_sets_of_metrics_do_not_share_a_series() {
        let (one, two) = (Metrics::new("lon"), Metrics::new("lon"));
        one.provisioned.inc();
        shows(&two.render(), "choria_provisioner_provisioned{site=\"lon\"} 0");
    }

    #[track_caller]
    fn shows(text: &str, line: &str) {
        assert!(text.lines().any(|each| each == line), "{line}\nis not in\n{text}");
    }
}
