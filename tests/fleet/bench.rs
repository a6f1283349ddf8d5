//! The comparison behind `dist/bench`: this daemon, another one and a bare loop, in turns in one go, on one broker and one
//! practice fleet each time. It leaves no process and no file behind.
//!
//! Broker and fleet share the machine with whoever is measured, so figures mean something only beside the others of the
//! same go.

#[path = "bare.rs"]
mod bare;
#[path = "mod.rs"]
mod fleet;
#[path = "plot.rs"]
mod plot;
#[path = "rig.rs"]
mod rig;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use argh::FromArgs;
use fleet::Fleet;
use fleet::fault::{Fault, parse_list};
use fleet::network::{Network, Setup};
use plot::{Curve, Panel};
use rig::{
    Broker, COUNTS, Folder, LISTENS, Process, Settings, first_discovery, interrupted, median, say,
    text,
};

/// Measures this daemon beside another one, and beside a loop that does nothing but send the requests.
#[derive(FromArgs)]
struct Arguments {
    /// this daemon's program
    #[argh(option)]
    daemon: PathBuf,

    /// another daemon's program; none by default
    #[argh(option)]
    other: Option<PathBuf>,

    /// the folder with the compiled helper
    #[argh(option)]
    examples: PathBuf,

    /// how many nodes, 2000 by default; a tenth of them for a helper in Python
    #[argh(option, default = "2000")]
    nodes: usize,

    /// how many are worked on at once, 8 by default
    #[argh(option, default = "8")]
    workers: usize,

    /// how often each is measured, 3 by default
    #[argh(option, default = "3")]
    rounds: usize,

    /// what to measure: compiled, persistent, issuer, python, python-persistent, gone, silent, start; all by default, and
    /// nothing is none
    #[argh(
        option,
        default = "String::from(\"compiled,persistent,issuer,python,python-persistent,gone,silent,start\")"
    )]
    rows: String,

    /// the longest a run may take, in seconds, 60 by default; runs of another daemon may not end, ours get a second more for
    /// each hundred nodes
    #[argh(option, default = "60")]
    timeout: u64,

    /// leave out the bare loop
    #[argh(switch)]
    no_limit: bool,

    /// draw the speed against workers and against the size of the fleet, and the memory over the largest one, into this file (SVG)
    #[argh(option)]
    plot: Option<PathBuf>,

    /// count the instructions of one node's cycle instead, and fail if there are more than so many; wants valgrind
    #[argh(option)]
    count: Option<u64>,

    /// with --plot: numbers of workers, 1,2,4,8,16,32,64 by default
    #[argh(option, default = "String::from(\"1,2,4,8,16,32,64\")")]
    plot_workers: String,

    /// with --plot: sizes of fleets, 1000,5000,20000 by default; 50000 and 200000 work, too
    #[argh(option, default = "String::from(\"1000,5000,20000\")")]
    plot_nodes: String,
}

/// How often progress is looked at.
const REFRESH: Duration = Duration::from_millis(20);

/// How long a daemon is left alone before its idle memory counts.
const IDLE: Duration = Duration::from_secs(2);

/// Nodes a second that are waited for, however many there are.
const SLOWEST: u64 = 100;

/// How often memory is noted over a run.
const MEMORY_POINTS: f64 = 200.0;

fn main() -> ExitCode {
    let result = match bare::Arguments::of_process() {
        Some(arguments) => arguments.and_then(|arguments| bare::run(&arguments)),
        None => {
            let arguments: Arguments = rig::arguments();
            match arguments.count {
                Some(most) => count(&arguments, most),
                None => compare(&arguments),
            }
        }
    };
    rig::exit("bench", result.map(|()| true))
}

/// Counts the instructions of one node's cycle: what a larger fleet takes more than a smaller one, all that is done once left out.
fn count(arguments: &Arguments, most: u64) -> Result<(), String> {
    let helper = arguments.examples.join("helper").display().to_string();
    let (few, many) = COUNTED;
    let spent = instructions(arguments, &helper, few)?;
    let each = instructions(arguments, &helper, many)?.saturating_sub(spent) / (many - few) as u64;
    say(&format!("one node's cycle: {each} instructions, at most {most} expected"));
    match each > most {
        true => Err("a cycle takes more instructions than it should".to_owned()),
        false => Ok(()),
    }
}

/// Nodes of the two fleets that are compared.
const COUNTED: (usize, usize) = (50, 250);

/// Instructions of a daemon from its start to its end, with so many nodes.
fn instructions(arguments: &Arguments, helper: &str, nodes: usize) -> Result<u64, String> {
    let folder = Folder::create("choria-bench")?;
    let broker = Broker::start(&folder)?;
    let fleet = Fleet::builder(&broker.url).nodes(nodes).start_quietly();
    let settings = Settings {
        helper,
        workers: arguments.workers,
        interval: Duration::from_secs(60),
        loglevel: "error",
        persistent: true,
        work_queue: None,
        counted: true,
        pki: false,
        network: None,
        candidate: None,
        monitor_port: None,
    };
    let daemon = settings.start(&arguments.daemon, &folder, &broker)?;
    let deadline = Instant::now() + Duration::from_secs(arguments.timeout);
    while fleet.provisioned() < nodes {
        if !daemon.is_running() || Instant::now() > deadline {
            let provisioned = fleet.provisioned();
            return Err(format!("{provisioned} of {nodes} provisioned:\n{}", log(&folder)));
        }
        thread::sleep(REFRESH);
    }
    daemon.stop();
    let counts = fs::read_to_string(folder.path.join(COUNTS)).map_err(text)?;
    let total = counts.lines().find_map(|line| line.strip_prefix("totals: ")?.trim().parse().ok());
    total.ok_or_else(|| "valgrind counted nothing".to_owned())
}

/// Who is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Subject {
    Ours,
    Other,
    Limit,
}

/// What is measured.
#[derive(Clone)]
struct Row {
    name: &'static str,
    title: &'static str,
    /// The helper's command line, for a daemon that starts it for each node.
    helper: String,
    /// The same for one that keeps it.
    persistent: Option<String>,
    nodes: usize,
    workers: usize,
    faults: Vec<(usize, Fault)>,
    /// How the network is secured, if it is.
    setup: Option<Setup>,
}

fn compare(arguments: &Arguments) -> Result<(), String> {
    let interrupted = interrupted()?;
    let rows = rows(arguments)?;
    let wanted: Vec<&str> = arguments.rows.split(',').map(str::trim).collect();
    let wanted = if wanted == ["nothing"] { Vec::new() } else { wanted };
    let known = rows.iter().map(|row| row.name).chain(["start"]).collect::<Vec<_>>();
    if let Some(unknown) = wanted.iter().find(|name| !known.contains(name)) {
        return Err(format!("--rows {unknown}: none of {}", known.join(", ")));
    }
    let mut subjects = vec![Subject::Ours];
    subjects.extend(arguments.other.as_ref().map(|_| Subject::Other));
    say(&machine());
    if wanted.contains(&"start") {
        let mut starts: Vec<Vec<Start>> = vec![Vec::new(); subjects.len()];
        for _ in 0..arguments.rounds {
            for (&subject, starts) in subjects.iter().zip(&mut starts) {
                if interrupted() {
                    return Err("interrupted".to_owned());
                }
                starts.push(start(arguments, subject)?);
            }
        }
        say(&format!("\n### Start and idleness, {} rounds\n", arguments.rounds));
        table(
            &subjects,
            &[
                column("start to first discovery, ms", Better::Less, &starts, |start| {
                    start.discovery_ms
                }),
                column("idle memory, MB", Better::Less, &starts, |start| start.idle_mb),
            ],
        );
    }
    for row in rows.iter().filter(|row| wanted.contains(&row.name)) {
        // Nothing is lost to nodes that are not there in a loop that knows them.
        let mut subjects = subjects.clone();
        if row.faults.is_empty() && row.setup.is_none() && !arguments.no_limit {
            subjects.push(Subject::Limit);
        }
        let mut runs: Vec<Vec<Run>> = vec![Vec::new(); subjects.len()];
        for _ in 0..arguments.rounds {
            for (&subject, runs) in subjects.iter().zip(&mut runs) {
                if interrupted() {
                    return Err("interrupted".to_owned());
                }
                runs.push(run(arguments, row, subject)?);
            }
        }
        say(&format!(
            "\n### {}; {} nodes, {} workers, {} rounds\n",
            row.title, row.nodes, row.workers, arguments.rounds
        ));
        table(
            &subjects,
            &[
                column("nodes/s", Better::More, &runs, |run| run.rate),
                column("CPU of the daemon, ms a node", Better::Less, &runs, |run| run.daemon_ms),
                column("CPU of the broker, ms a node", Better::Less, &runs, |run| run.broker_ms),
                column("peak memory, MB", Better::Less, &runs, |run| run.peak_mb),
            ],
        );
        for (subject, runs) in subjects.iter().zip(&runs) {
            for run in runs.iter().filter(|run| run.missing > 0) {
                let why = match run.ended_early {
                    true => "when it ended by itself".to_owned(),
                    false => format!("within {} s", arguments.timeout),
                };
                say(&format!("{subject:?}: {} nodes were not provisioned {why}", run.missing));
            }
            if let Some(violation) = runs.iter().find_map(|run| run.violation.as_ref()) {
                say(&format!("{subject:?} did what it must not: {violation}"));
            }
        }
    }
    match &arguments.plot {
        Some(path) => {
            let rows = rows.iter().filter(|row| ["compiled", "persistent"].contains(&row.name));
            let panels = curves(arguments, rows, &interrupted)?;
            fs::write(path, plot::svg(&panels))
                .map_err(|error| format!("{}: {error}", path.display()))
        }
        None => Ok(()),
    }
}

/// Speed against workers and against nodes, and memory over the largest fleet.
fn curves<'a>(
    arguments: &Arguments,
    rows: impl Iterator<Item = &'a Row> + Clone,
    interrupted: &dyn Fn() -> bool,
) -> Result<Vec<Panel>, String> {
    let numbers = |list: &str| {
        let numbers = list.split(',').map(|number| number.trim().parse::<usize>());
        numbers.collect::<Result<Vec<_>, _>>().map_err(|error| format!("{list}: {error}"))
    };
    let (workers, nodes) = (numbers(&arguments.plot_workers)?, numbers(&arguments.plot_nodes)?);
    let largest = nodes.iter().copied().max().unwrap_or(0);
    let (mut by_workers, mut by_nodes, mut memory) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        let staying = row.persistent.is_some();
        let mut subjects = Vec::new();
        if staying {
            subjects.push((Subject::Ours, "this daemon, helper stays"));
            if !arguments.no_limit {
                subjects.push((Subject::Limit, "bare loop, helper stays"));
            }
        } else {
            subjects.push((Subject::Ours, "this daemon, helper started for each node"));
            if arguments.other.is_some() {
                subjects.push((Subject::Other, "the other, helper started for each node"));
            }
        }
        for (subject, name) in subjects {
            let mut measure = |row: &Row| {
                if interrupted() {
                    return Err("interrupted".to_owned());
                }
                let runs = (0..arguments.rounds).map(|_| run(arguments, row, subject));
                let mut runs = runs.collect::<Result<Vec<_>, _>>()?;
                runs.sort_by(|one, other| one.rate.total_cmp(&other.rate));
                let run = runs.swap_remove(runs.len() / 2);
                let (rate, peak) = (run.rate, run.peak_mb);
                let missing = match run.missing {
                    0 => String::new(),
                    missing => format!("; {missing} were not provisioned"),
                };
                say(&format!(
                    "{name}: {} nodes, {} workers: {rate:.0} nodes/s, {:.2} ms CPU a node, {peak:.1} MB{missing}",
                    row.nodes, row.workers, run.daemon_ms
                ));
                if row.nodes == largest && subject == Subject::Ours && staying {
                    memory.push(Curve { name: name.to_owned(), points: run.memory });
                }
                Ok(rate)
            };
            let mut curve = |rows: Vec<(usize, Row)>| {
                let mut points = Vec::new();
                for (across, row) in rows {
                    points.push((across as f64, measure(&row)?));
                }
                Ok::<_, String>(Curve { name: name.to_owned(), points })
            };
            let of = |workers| (workers, Row { workers, ..row.clone() });
            by_workers.push(curve(workers.iter().copied().map(of).collect())?);
            let of = |nodes| (nodes, Row { nodes, ..row.clone() });
            by_nodes.push(curve(nodes.iter().copied().map(of).collect())?);
        }
    }
    let panel = |title: String, across, curves| Panel { title, across, doubles: true, curves };
    Ok(vec![
        panel(format!("nodes/s, {} nodes", arguments.nodes), "workers", by_workers),
        panel(format!("nodes/s, {} workers", arguments.workers), "nodes", by_nodes),
        Panel {
            doubles: false,
            ..panel(format!("memory in MB, {largest} nodes"), "nodes provisioned", memory)
        },
    ])
}

fn rows(arguments: &Arguments) -> Result<Vec<Row>, String> {
    let shipped = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("dist/helpers").join(name);
        shell_words::quote(&path.display().to_string()).into_owned()
    };
    let compiled = arguments.examples.join("helper").display().to_string();
    let compiled = shell_words::quote(&compiled).into_owned();
    let nodes = arguments.nodes;
    let workers = arguments.workers;
    let row = |name, title, helper: &str, persistent: Option<&str>, nodes, faults: &str| {
        let (helper, persistent) = (helper.to_owned(), persistent.map(str::to_owned));
        Ok::<Row, String>(Row {
            name,
            title,
            helper,
            persistent,
            nodes,
            workers,
            faults: parse_list(faults)?,
            setup: None,
        })
    };
    let interpreter = interpreter();
    let python = format!("{interpreter} {}", shipped("sample.py"));
    let staying = format!("{interpreter} {}", shipped("persistent.py"));
    Ok(vec![
        row("compiled", "Compiled helper, started for each node", &compiled, None, nodes, "")?,
        row(
            "persistent",
            "Compiled helper that stays (with this daemon)",
            &compiled,
            Some(&compiled),
            nodes,
            "",
        )?,
        Row {
            setup: Some(Setup::Issuer),
            ..row(
                "issuer",
                "Organization issuer over TLS, compiled helper started for each node",
                &compiled,
                None,
                nodes / 2,
                "",
            )?
        },
        row(
            "python",
            "Helper in Python, started for each node",
            &python,
            None,
            (nodes / 10).max(1),
            "",
        )?,
        row(
            "python-persistent",
            "Helper in Python that stays (with this daemon)",
            &python,
            Some(&staying),
            (nodes / 10).max(1),
            "",
        )?,
        row(
            "gone",
            "A quarter of the nodes announced and gone",
            &compiled,
            None,
            nodes / 2,
            &format!("gone={}", nodes / 8),
        )?,
        row(
            "silent",
            "One node in twenty connected and silent",
            &compiled,
            None,
            nodes / 2,
            &format!("silent={}", nodes / 40),
        )?,
    ])
}

/// The system's Python, which sites use; without it what the path names, past any script that only looks for it.
fn interpreter() -> String {
    if Path::new(SYSTEM_PYTHON).exists() {
        return SYSTEM_PYTHON.to_owned();
    }
    let asked = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
    let path = asked.ok().and_then(|output| String::from_utf8(output.stdout).ok());
    let path = path.filter(|path| !path.trim().is_empty()).unwrap_or("python3".to_owned());
    shell_words::quote(path.trim()).into_owned()
}

const SYSTEM_PYTHON: &str = "/usr/bin/python3";

/// A daemon with nothing to do.
#[derive(Debug, Clone, Copy)]
struct Start {
    discovery_ms: f64,
    idle_mb: f64,
}

fn start(arguments: &Arguments, subject: Subject) -> Result<Start, String> {
    let folder = Folder::create("choria-bench")?;
    let broker = Broker::start(&folder)?;
    let fleet =
        Fleet::builder(&broker.url).nodes(1).discoverable(false).announce(false).start_quietly();
    let begun = Instant::now();
    let helper = arguments.examples.join("helper").display().to_string();
    let launch = Launch { subject, helper: &helper, staying: false, network: None };
    let daemon = launch.start(arguments, &folder, &broker, arguments.workers, 0)?;
    let discovered = first_discovery(&fleet, &daemon)?;
    thread::sleep(IDLE);
    let idle_mb = daemon.usage().bytes as f64 / 1e6;
    Ok(Start { discovery_ms: discovered.duration_since(begun).as_secs_f64() * 1e3, idle_mb })
}

/// One fleet provisioned.
#[derive(Debug, Clone)]
struct Run {
    rate: f64,
    daemon_ms: f64,
    broker_ms: f64,
    peak_mb: f64,
    /// Megabytes, by nodes provisioned.
    memory: Vec<(f64, f64)>,
    missing: usize,
    ended_early: bool,
    violation: Option<String>,
}

fn run(arguments: &Arguments, row: &Row, subject: Subject) -> Result<Run, String> {
    let folder = Folder::create("choria-bench")?;
    let network = row.setup.map(|setup| Network::create(&folder.path, setup));
    let network = network.transpose().map_err(text)?;
    let (broker, builder) = match &network {
        None => {
            let broker = Broker::start(&folder)?;
            let builder = Fleet::builder(&broker.url);
            (broker, builder)
        }
        Some(network) => {
            let broker = Broker::configured(&folder, &network.broker())?;
            // Nobody is to pay for it while somebody is measured.
            let builder = network.fleet(&broker.url).check_later();
            (broker, builder)
        }
    };
    let mut builder = builder.nodes(row.nodes);
    for (count, fault) in &row.faults {
        builder = builder.fault(*count, fault.clone());
    }
    // The gone ones are known by their events only, and the others must not be finished before those go out.
    let by_events = !row.faults.is_empty();
    let fleet = builder.discoverable(!by_events).start_quietly();
    let broken: usize = row.faults.iter().map(|(count, _)| count).sum();
    let wanted = row.nodes - broken;

    let keeps = row.persistent.as_ref().filter(|_| subject != Subject::Other);
    let helper = keeps.unwrap_or(&row.helper);
    let broker_before = broker.process.usage().cpu_secs;
    let launch = Launch { subject, helper, staying: keeps.is_some(), network: network.as_ref() };
    let daemon = launch.start(arguments, &folder, &broker, row.workers, row.nodes)?;
    let (mut first, mut last) = (None, None);
    let mut memory: Vec<(f64, f64)> = Vec::new();
    if by_events {
        first_discovery(&fleet, &daemon)?;
        thread::sleep(LISTENS);
        first = Some((Instant::now(), 0));
        fleet.announce();
    }
    let longest = match subject {
        Subject::Other => arguments.timeout,
        Subject::Ours | Subject::Limit => arguments.timeout + row.nodes as u64 / SLOWEST,
    };
    let deadline = Instant::now() + Duration::from_secs(longest);
    // Of a process that has ended the system tells no more.
    let mut usage = daemon.usage();
    let mut ended_early = false;
    loop {
        let (now, provisioned) = (Instant::now(), fleet.provisioned());
        if provisioned > 0 && first.is_none() {
            first = Some((now, provisioned));
        }
        if last.is_none_or(|(_, before)| provisioned > before) {
            last = Some((now, provisioned));
        }
        if provisioned >= wanted || now > deadline {
            break;
        }
        match daemon.is_running() {
            true => {
                usage = daemon.usage();
                let step = row.nodes as f64 / MEMORY_POINTS;
                if memory.last().is_none_or(|(at, _)| provisioned as f64 >= at + step) {
                    memory.push((provisioned as f64, usage.bytes as f64 / 1e6));
                }
            }
            // That of another daemon is a result like any other.
            false if subject == Subject::Other => {
                ended_early = true;
                break;
            }
            false => return Err(format!("{subject:?} ended early:\n{}", log(&folder))),
        }
        thread::sleep(REFRESH);
    }
    if !ended_early {
        usage = daemon.usage();
    }
    let broker_usage = broker.process.usage();
    let (Some((begun, before)), Some((ended, served))) = (first, last) else {
        return Err(format!("{subject:?} provisioned no node:\n{}", log(&folder)));
    };
    // A run that did not end has not ended at its last node.
    let ended = if served < wanted { Instant::now() } else { ended };
    let secs = ended.duration_since(begun).as_secs_f64().max(REFRESH.as_secs_f64());
    let per_node = |secs: f64| secs * 1e3 / served as f64;
    Ok(Run {
        rate: (served - before).max(1) as f64 / secs,
        daemon_ms: per_node(usage.cpu_secs),
        broker_ms: per_node(broker_usage.cpu_secs - broker_before),
        peak_mb: usage.peak_bytes as f64 / 1e6,
        memory,
        missing: wanted - served,
        ended_early,
        violation: fleet.violations().into_iter().next(),
    })
}

/// Who is to be started, and how.
struct Launch<'a> {
    subject: Subject,
    helper: &'a str,
    /// Whether the helper stays from node to node.
    staying: bool,
    network: Option<&'a Network>,
}

impl Launch<'_> {
    fn start(
        &self,
        arguments: &Arguments,
        folder: &Folder,
        broker: &Broker,
        workers: usize,
        nodes: usize,
    ) -> Result<Process, String> {
        let Launch { subject, helper, staying: persistent, network } = *self;
        let program = match (subject, &arguments.other) {
            (Subject::Ours, _) => &arguments.daemon,
            (Subject::Other, Some(other)) => other,
            (Subject::Other, None) => return Err("there is no other daemon".to_owned()),
            (Subject::Limit, _) => {
                let broker = broker.url.clone();
                let helper = helper.to_owned();
                let bare = bare::Arguments { broker, helper, persistent, workers, nodes };
                let program = std::env::current_exe().map_err(text)?;
                return Process::start(Command::new(program).args(bare.to_words()));
            }
        };
        let settings = Settings {
            helper,
            workers,
            // The shortest that the original takes.
            interval: Duration::from_secs(60),
            loglevel: "error",
            persistent,
            // Only this daemon knows the setting, and only a fleet that does not fit needs it.
            work_queue: (nodes > QUEUE_DEFAULT && subject == Subject::Ours).then_some(nodes),
            counted: false,
            pki: false,
            network,
            candidate: None,
            monitor_port: None,
        };
        settings.start(program, folder, broker)
    }
}

/// Nodes that the queue holds when nothing is set.
const QUEUE_DEFAULT: usize = 50_000;

fn log(folder: &Folder) -> String {
    fs::read_to_string(folder.path.join("daemon.log")).unwrap_or_default()
}

/// Which of two figures is to be preferred.
#[derive(Clone, Copy)]
enum Better {
    More,
    Less,
}

/// One line of a table: a figure of each run of each subject.
struct Column {
    title: &'static str,
    better: Better,
    figures: Vec<Vec<f64>>,
}

fn column<T>(
    title: &'static str,
    better: Better,
    runs: &[Vec<T>],
    figure: impl Fn(&T) -> f64 + Copy,
) -> Column {
    Column {
        title,
        better,
        figures: runs.iter().map(|runs| runs.iter().map(figure).collect()).collect(),
    }
}

/// Prints medians with their spread, and how many times better we are.
fn table(subjects: &[Subject], columns: &[Column]) {
    let name = |subject: &Subject| match subject {
        Subject::Ours => "this daemon",
        Subject::Other => "the other",
        Subject::Limit => "bare loop",
    };
    let mut rows = vec![vec![String::new(), name(&subjects[0]).to_owned()]];
    for subject in &subjects[1..] {
        rows[0].push(name(subject).to_owned());
        rows[0].push("times better".to_owned());
    }
    for Column { title, better, figures } in columns {
        let ours = median(&figures[0]);
        let mut row = vec![(*title).to_owned(), spread(&figures[0])];
        for figures in &figures[1..] {
            row.push(spread(figures));
            let ratio = match better {
                Better::More => ours / median(figures),
                Better::Less => median(figures) / ours,
            };
            row.push(if ratio.is_finite() { format!("{ratio:.2}") } else { "-".to_owned() });
        }
        rows.push(row);
    }
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    for (number, row) in rows.iter().enumerate() {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        say(&format!("| {} |", cells.collect::<Vec<_>>().join(" | ")));
        if number == 0 {
            let rules = widths.iter().map(|width| "-".repeat((*width).max(3)));
            say(&format!("| {} |", rules.collect::<Vec<_>>().join(" | ")));
        }
    }
}

/// The median, and the smallest and largest in brackets.
fn spread(figures: &[f64]) -> String {
    let digits = |figure: f64| match figure {
        figure if figure >= 100.0 => format!("{figure:.0}"),
        figure if figure >= 10.0 => format!("{figure:.1}"),
        figure => format!("{figure:.2}"),
    };
    let (least, most) = figures
        .iter()
        .fold((f64::MAX, 0.0_f64), |(least, most), &figure| (least.min(figure), most.max(figure)));
    format!("{} ({} - {})", digits(median(figures)), digits(least), digits(most))
}

/// What it is measured on.
fn machine() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name))
        .unwrap_or("unknown processor");
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or_default();
    format!(
        "{cores} cores of {model}, shared by broker, practice nodes and whoever is measured; load before: {load}"
    )
}
