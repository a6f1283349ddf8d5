//! Arguments in, exit code out: reads the configuration, takes port, signals and pid file, and starts the daemon.

use std::env;
use std::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use choria_provisioner::cli::{self, Invocation, PROGRAM, Run, VERSION};
use choria_provisioner::config::choria::default_file;
use choria_provisioner::config::{self, Surroundings};
use choria_provisioner::coredump;
use choria_provisioner::descriptors;
use choria_provisioner::fleet::{self, Setup};
use choria_provisioner::logging::{Log, chain};
use choria_provisioner::ops::http::Monitor;
use choria_provisioner::pidfile::PidFile;
use choria_provisioner::shutdown::Signals;

fn main() -> ExitCode {
    let end = match cli::parse(env::args_os().skip(1)) {
        Ok(Invocation::Show(text)) => {
            let shown = io::stdout().write_all(text.as_bytes());
            shown.map_or(End::Failed, |()| End::Well)
        }
        Ok(Invocation::Run(arguments)) => run(&arguments),
        Err(error) => {
            say(format_args!("error: {error}\nSee {PROGRAM} --help."));
            End::Usage
        }
    };
    ExitCode::from(end as u8)
}

/// How the process ends; the numbers are promised to whoever started it.
#[derive(Debug, Clone, Copy)]
enum End {
    Well = 0,
    Failed = 1,
    Usage = 2,
    NotPermitted = 77,
    BadConfiguration = 78,
}

fn run(arguments: &Run) -> End {
    // Before anything secret is read.
    coredump::forbid();
    let surroundings = Surroundings::of_process();
    let client = arguments.choria_config.clone().unwrap_or_else(|| default_file(&surroundings));
    let mut settings = match config::load(&arguments.config, &client, &surroundings) {
        Ok(settings) => settings,
        Err(report) => {
            for warning in &report.warnings {
                say(format_args!("warning: {warning}"));
            }
            for error in &report.errors {
                say(format_args!("error: {error}"));
            }
            // The path in the error is the last of several, and none that the user named.
            if arguments.choria_config.is_none() && !client.try_exists().unwrap_or(true) {
                say(format_args!(
                    "no client file is where Choria looks for one: name it with --choria-config"
                ));
            }
            return if report.denied { End::NotPermitted } else { End::BadConfiguration };
        }
    };
    if arguments.debug {
        settings.config.loglevel = log::LevelFilter::Debug;
    }
    let config = &settings.config;
    let log = match Log::start(&config.logfile, config.log_format, config.loglevel) {
        Ok(log) => log,
        Err(error) => {
            say(format_args!("error: {}", chain(&error)));
            return if is_denied(&error) { End::NotPermitted } else { End::BadConfiguration };
        }
    };
    for warning in &settings.warnings {
        log::warn!(component = "config"; "{warning}");
    }
    match serve(arguments, settings, &log) {
        Ok(()) => End::Well,
        Err(error) => {
            tell(&log, &*error);
            if is_denied(&*error) { End::NotPermitted } else { End::Failed }
        }
    }
}

/// Runs the daemon until it is told to stop.
fn serve(arguments: &Run, settings: config::Settings, log: &Log) -> Result<(), Box<dyn Error>> {
    let config = settings.config;
    descriptors::raise(config.workers);
    // Before any work starts: a port in use must not end a daemon that has nodes in its hands.
    let monitor = match config.monitor_port {
        0 => None,
        port => Some(Monitor::bind(config.monitor_address, port)?),
    };
    let signals = Signals::install()?;
    // Lives until the end of this function, whichever way it ends.
    let pid = arguments.pid.as_deref().map(PidFile::write).transpose()?;
    if let Some(pid) = &pid {
        pid.remove_on_panic();
    }
    log::info!(component = "provisioner", version = VERSION; "Starting with {}", arguments.config.display());
    let setup =
        Setup { config, choria: settings.choria, monitor, version: VERSION, log: log.clone() };
    fleet::run(setup, signals)?;
    Ok(())
}

/// Writes to standard error. That nobody can read it, on a full disk for instance, changes nothing: `eprintln` would end
/// the process there, with another exit code than the one that was promised.
fn say(what: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{PROGRAM}: {what}");
}

/// Logs an error, and shows it where the process was started if the log goes elsewhere.
fn tell(log: &Log, error: &dyn Error) {
    let text = chain(error);
    log::error!(component = "provisioner"; "{text}");
    if !log.shows_errors() {
        say(format_args!("error: {text}"));
    }
}

fn is_denied(error: &(dyn Error + 'static)) -> bool {
    let is_it = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    error.downcast_ref().is_some_and(is_it) || error.source().is_some_and(is_denied)
}
