//! What broken nodes cost the others, behind `dist/harm`: the same good nodes are provisioned with broken ones among them and
//! without, in turns, with a daemon whose settings are the default ones. It leaves no process and no file behind.

#[path = "mod.rs"]
mod fleet;
#[path = "rig.rs"]
mod rig;

use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use argh::FromArgs;
use fleet::fault::Fault;
use fleet::{Action, Fleet, Token};
use rig::{Broker, Folder, LISTENS, Process, Settings, first_discovery, interrupted, median, say};

/// Measures how much slower good nodes are provisioned when broken ones are among them.
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

    /// the longest a run may take, in seconds, 120 by default
    #[argh(option, default = "120")]
    timeout: u64,
}

/// Broken nodes among good ones.
struct Scenario {
    title: &'static str,
    good: usize,
    broken: usize,
    fault: Fault,
    /// When the good ones come.
    good_come: When,
    /// The least share of their speed without the broken ones.
    goal: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// Together with the broken ones.
    Together,
    /// When every broken one has failed this often.
    AfterFailures(u32),
}

fn scenarios() -> [Scenario; 4] {
    [
        Scenario {
            title: "a quarter is gone",
            good: 1_500,
            broken: 500,
            fault: Fault::Gone,
            good_come: When::Together,
            goal: 1.0 / 1.1,
        },
        Scenario {
            title: "5% are connected and silent",
            good: 1_900,
            broken: 100,
            fault: Fault::Silent,
            good_come: When::Together,
            goal: 0.9,
        },
        Scenario {
            title: "5% answer the inventory and nothing after it",
            good: 1_900,
            broken: 100,
            fault: Fault::SilentFrom(Action::Jwt),
            good_come: When::Together,
            goal: 0.7,
        },
        Scenario {
            title: "as many fail for ever, and have failed twice",
            good: 1_000,
            broken: 1_000,
            fault: Fault::Token(Token::Foreign),
            good_come: When::AfterFailures(2),
            goal: 0.9,
        },
    ]
}

/// How often progress is looked at.
const REFRESH: Duration = Duration::from_millis(5);

fn main() -> ExitCode {
    match measure(&argh::from_env()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            say(&format!("harm: {problem}"));
            ExitCode::from(2)
        }
    }
}

/// Prints a line for each scenario; `false` when one missed its goal.
fn measure(arguments: &Arguments) -> Result<bool, String> {
    let interrupted = interrupted()?;
    say(
        "| broken nodes | good | broken | good nodes/s without | with | share of the speed | goal |",
    );
    say("| --- | --- | --- | --- | --- | --- | --- |");
    let mut reached = true;
    for scenario in scenarios() {
        let scaled = |count: usize| ((count as f64 * arguments.scale) as usize).max(1);
        let (good, broken) = (scaled(scenario.good), scaled(scenario.broken));
        let (mut without, mut with) = (Vec::new(), Vec::new());
        for _ in 0..arguments.rounds.max(1) {
            if interrupted() {
                return Err("interrupted".to_owned());
            }
            without.push(rate(arguments, &scenario, good, 0)?);
            with.push(rate(arguments, &scenario, good, broken)?);
        }
        let (without, with) = (median(&without), median(&with));
        let share = with / without;
        reached &= share >= scenario.goal;
        say(&format!(
            "| {} | {good} | {broken} | {without:.0} | {with:.0} | {share:.2} | {:.2} |",
            scenario.title, scenario.goal
        ));
    }
    Ok(reached)
}

/// Good nodes provisioned in a second, from the moment they announce themselves to the last.
fn rate(
    arguments: &Arguments,
    scenario: &Scenario,
    good: usize,
    broken: usize,
) -> Result<f64, String> {
    let folder = Folder::create("choria-harm")?;
    let broker = Broker::start(&folder)?;
    // Spread among the good ones, as in a real fleet; known by their events, since the gone ones answer nothing.
    let fleet = Fleet::builder(&broker.url)
        .nodes(good + broken)
        .fault(broken, scenario.fault.clone())
        .discoverable(false)
        .start_quietly();
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
    };
    let daemon = settings.start(&arguments.daemon, &folder, &broker)?;
    let deadline = Instant::now() + Duration::from_secs(arguments.timeout);
    first_discovery(&fleet, &daemon)?;
    thread::sleep(LISTENS);
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
    match fleet.violations().into_iter().next() {
        Some(violation) => Err(format!("{}: {violation}", scenario.title)),
        None => Ok(rate),
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
