//! What broken nodes cost the others, and a crowd at the monitor port, behind `dist/harm`: the same good nodes are provisioned
//! with that trouble and without, in turns, with a daemon whose settings are the default ones. It leaves no process and no file
//! behind.

#[path = "mod.rs"]
mod fleet;
#[path = "rig.rs"]
mod rig;

use std::path::PathBuf;
use std::process::ExitCode;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use argh::FromArgs;
use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use fleet::crowd::{Crowd, Wall};
use fleet::fault::Fault;
use fleet::{Action, Fleet, Token};
use rig::{
    Broker, Folder, LISTENS, Process, SCRAPE_MAX, Settings, first_discovery, free_port,
    interrupted, median, say, scrape, text,
};

/// Measures how much slower good nodes are provisioned when broken ones are among them, or the monitor port is crowded.
#[derive(FromArgs)]
struct Arguments {
    /// the daemon's program
    #[argh(option)]
    daemon: PathBuf,

    /// the helper's command line
    #[argh(option)]
    helper: String,

    /// how often each is measured, 3 by default
    #[argh(option, default = "3")]
    rounds: usize,

    /// the share of the nodes that is measured, 1 by default; a small one is for trying
    #[argh(option, default = "1.0")]
    scale: f64,

    /// only what has this in its title; everything by default
    #[argh(option, default = "String::new()")]
    only: String,

    /// the longest a run may take, in seconds, 120 by default
    #[argh(option, default = "120")]
    timeout: u64,
}

/// Good nodes in trouble.
struct Scenario {
    title: &'static str,
    good: usize,
    trouble: Trouble,
    /// When the good ones come.
    good_come: When,
    /// The least share of their speed without the trouble.
    goal: f64,
}

enum Trouble {
    /// So many broken nodes.
    Nodes(usize, Fault),
    /// A crowd at the monitor port, which comes first. Without the trouble it is at another port: what it takes from the two
    /// processors itself is no work of the daemon's.
    Crowd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// Together with the broken ones, if there are any.
    Together,
    /// When every broken one has failed this often.
    AfterFailures(u32),
}

fn scenarios() -> [Scenario; 5] {
    [
        Scenario {
            title: "a quarter is gone",
            good: 1_500,
            trouble: Trouble::Nodes(500, Fault::Gone),
            good_come: When::Together,
            goal: 1.0 / 1.1,
        },
        Scenario {
            title: "5% are connected and silent",
            good: 1_900,
            trouble: Trouble::Nodes(100, Fault::Silent),
            good_come: When::Together,
            goal: 0.9,
        },
        Scenario {
            title: "5% answer the inventory and nothing after it",
            good: 1_900,
            trouble: Trouble::Nodes(100, Fault::SilentFrom(Action::Jwt)),
            good_come: When::Together,
            goal: 0.7,
        },
        Scenario {
            title: "as many fail for ever, and have failed twice",
            good: 1_000,
            trouble: Trouble::Nodes(1_000, Fault::Token(Token::Foreign)),
            good_come: When::AfterFailures(2),
            goal: 0.9,
        },
        Scenario {
            title: "a crowd at the monitor port, not at another",
            good: 2_000,
            trouble: Trouble::Crowd,
            good_come: When::Together,
            goal: 0.9,
        },
    ]
}

/// The time from one scrape to the next.
const SCRAPE_PAUSE: Duration = Duration::from_millis(200);

/// How often progress is looked at.
const REFRESH: Duration = Duration::from_millis(5);

fn main() -> ExitCode {
    rig::exit("harm", measure(&rig::arguments()))
}

/// Prints a line for each scenario; `false` when one missed its goal.
fn measure(arguments: &Arguments) -> Result<bool, String> {
    let interrupted = interrupted()?;
    say(
        "| trouble | good nodes | broken | good nodes/s without | with | share of the speed | goal | longest scrape, ms |",
    );
    say("| --- | --- | --- | --- | --- | --- | --- | --- |");
    let mut reached = true;
    for scenario in scenarios().iter().filter(|each| each.title.contains(&arguments.only)) {
        let (mut without, mut with) = (Vec::new(), Vec::new());
        for _ in 0..arguments.rounds.max(1) {
            if interrupted() {
                return Err("interrupted".to_owned());
            }
            without.push(run(arguments, scenario, false)?);
            with.push(run(arguments, scenario, true)?);
        }
        let rate = |runs: &[Run]| median(&runs.iter().map(|run| run.rate).collect::<Vec<_>>());
        let scrape = with.iter().map(|run| run.longest_scrape).max().unwrap_or_default();
        let (without, with) = (rate(&without), rate(&with));
        let share = with / without;
        let is_reached = share >= scenario.goal && scrape <= SCRAPE_MAX;
        reached &= is_reached;
        say(&format!(
            "| {} | {} | {} | {without:.0} | {with:.0} | {share:.2} | {:.2}{} | {} |",
            scenario.title,
            scaled(arguments, scenario.good),
            scenario.broken(arguments),
            scenario.goal,
            if is_reached { "" } else { ", **missed**" },
            scrape.as_millis()
        ));
    }
    Ok(reached)
}

fn scaled(arguments: &Arguments, count: usize) -> usize {
    ((count as f64 * arguments.scale) as usize).max(1)
}

impl Scenario {
    /// How many broken nodes there are.
    fn broken(&self, arguments: &Arguments) -> usize {
        match self.trouble {
            Trouble::Nodes(broken, _) => scaled(arguments, broken),
            Trouble::Crowd => 0,
        }
    }
}

/// What one run came to.
struct Run {
    /// Good nodes provisioned in a second, from the moment they announce themselves to the last.
    rate: f64,
    longest_scrape: Duration,
}

fn run(arguments: &Arguments, scenario: &Scenario, has_trouble: bool) -> Result<Run, String> {
    let folder = Folder::create("choria-harm")?;
    let broker = Broker::start(&folder)?;
    let good = scaled(arguments, scenario.good);
    let mut builder = Fleet::builder(&broker.url).discoverable(false);
    // Spread among the good ones, as in a real fleet; known by their events, since the gone ones answer nothing.
    builder = match &scenario.trouble {
        Trouble::Nodes(_, fault) if has_trouble => {
            let broken = scenario.broken(arguments);
            builder.nodes(good + broken).fault(broken, fault.clone())
        }
        Trouble::Nodes(..) | Trouble::Crowd => builder.nodes(good),
    };
    let fleet = builder.start_quietly();
    let monitor_port = free_port()?;
    let settings = Settings {
        helper: &arguments.helper,
        workers: 0,
        interval: Duration::from_secs(60),
        loglevel: "info",
        persistent: false,
        work_queue: None,
        counted: false,
        pki: false,
        network: None,
        candidate: None,
        monitor_port: Some(monitor_port),
    };
    let daemon = settings.start(&arguments.daemon, &folder, &broker)?;
    let deadline = Instant::now() + Duration::from_secs(arguments.timeout);
    first_discovery(&fleet, &daemon)?;
    thread::sleep(LISTENS);
    let _crowd = match scenario.trouble {
        Trouble::Crowd if has_trouble => Some((Crowd::gather(monitor_port).map_err(text)?, None)),
        Trouble::Crowd => {
            let wall = Wall::build().map_err(text)?;
            Some((Crowd::gather(wall.port()).map_err(text)?, Some(wall)))
        }
        Trouble::Nodes(..) => None,
    };
    let scraper = Scraper::start(monitor_port);
    let named = |with_fault: bool| -> Vec<String> {
        let chosen = fleet.iter().filter(|node| node.fault().is_some() == with_fault);
        chosen.map(|node| node.identity()).collect()
    };
    let (good_ones, broken_ones) = (named(false), named(true));
    let announce = |names: &[String]| fleet.announce_identities(names.iter().map(String::as_str));
    let begun = match scenario.good_come {
        When::Together => {
            let begun = Instant::now();
            fleet.announce();
            begun
        }
        When::AfterFailures(times) => {
            // Its second failure in a row is the last after which a node is taken again when it is seen.
            for time in 1..=times {
                announce(&broken_ones);
                wait(&daemon, deadline, "the broken nodes are not asked", || {
                    let mut broken = fleet.iter().filter(|node| node.fault().is_some());
                    broken.all(|node| node.times_asked(Action::Jwt) >= time)
                })?;
                thread::sleep(LISTENS);
            }
            let begun = Instant::now();
            announce(&good_ones);
            begun
        }
    };
    wait(&daemon, deadline, "good nodes are not provisioned", || fleet.provisioned() >= good)?;
    let rate = good as f64 / begun.elapsed().as_secs_f64();
    let longest_scrape = scraper.longest();
    match fleet.violations().into_iter().next() {
        Some(violation) => Err(format!("{}: {violation}", scenario.title)),
        None => Ok(Run { rate, longest_scrape }),
    }
}

/// Asks for the metrics over and over, as several of Prometheus would.
struct Scraper {
    stop: Sender<()>,
    thread: JoinHandle<Duration>,
}

impl Scraper {
    fn start(port: u16) -> Scraper {
        let (stop, stopped) = bounded(0);
        let thread = thread::spawn(move || {
            let mut longest = Duration::ZERO;
            while stopped.recv_timeout(SCRAPE_PAUSE) == Err(RecvTimeoutError::Timeout) {
                let begun = Instant::now();
                // One that fails has taken for ever.
                let took = if scrape(port).is_ok() { begun.elapsed() } else { Duration::MAX };
                longest = longest.max(took);
            }
            longest
        });
        Scraper { stop, thread }
    }

    /// The longest time that one took.
    fn longest(self) -> Duration {
        drop(self.stop);
        self.thread.join().unwrap_or(Duration::MAX)
    }
}

fn wait(
    daemon: &Process,
    deadline: Instant,
    what: &str,
    done: impl Fn() -> bool,
) -> Result<(), String> {
    while !done() {
        if !daemon.is_running() {
            return Err("the daemon has ended".to_owned());
        }
        if Instant::now() > deadline {
            return Err(format!("{what} in time"));
        }
        thread::sleep(REFRESH);
    }
    Ok(())
}
