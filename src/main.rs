//! Arguments in, exit code out: reads the configuration, takes port, socket, signals and pid file, and starts the daemon; or
//! has a running one follow a command.

use std::env;
use std::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use choria_provisioner::check::places::{self, PortError};
use choria_provisioner::check::{self, Kind};
use choria_provisioner::cli::{self, Ask, Check, Files, Invocation, PROGRAM, Run, Try, VERSION};
use choria_provisioner::config::choria::default_file;
use choria_provisioner::config::report::Report;
use choria_provisioner::config::surroundings::Surroundings;
use choria_provisioner::config::{self, AdminSocket, LogFormat, LogTarget, Source};
use choria_provisioner::coredump;
use choria_provisioner::daemon::{self, Setup};
use choria_provisioner::descriptors;
use choria_provisioner::errors::chain;
use choria_provisioner::fleet::audit::AuditFile;
use choria_provisioner::helper::HelperCommand;
use choria_provisioner::logging::Log;
use choria_provisioner::ops::client;
use choria_provisioner::ops::socket::{self, BindError, Socket};
use choria_provisioner::pidfile::PidFile;
use choria_provisioner::rehearsal::{self, Failed, Shown, Would};
use choria_provisioner::shutdown::{Signals, is_over};

fn main() -> ExitCode {
    let end = match cli::parse(env::args_os().skip(1)) {
        Ok(Invocation::Show(text)) => {
            let shown = io::stdout().write_all(text.as_bytes());
            shown.map_or(End::Failed, |()| End::Well)
        }
        Ok(Invocation::Run(arguments)) => run(&arguments),
        Ok(Invocation::Ask(arguments)) => ask(&arguments),
        Ok(Invocation::Check(arguments)) => check(arguments),
        Ok(Invocation::Try(arguments)) => try_node(arguments),
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
    OutOfReach = 75,
    NotPermitted = 77,
    BadConfiguration = 78,
    /// By SIGINT and by SIGTERM, as a shell has it of whoever they end.
    Interrupted = 130,
    Terminated = 143,
}

fn run(arguments: &Run) -> End {
    // Before anything secret is read.
    coredump::forbid();
    let surroundings = Surroundings::of_process();
    let client = arguments.choria_config.clone().unwrap_or_else(|| default_file(&surroundings));
    let source = Source {
        yaml: arguments.config.clone(),
        client: client.clone(),
        surroundings,
        is_debug: arguments.debug,
    };
    let settings = match source.load() {
        Ok(settings) => settings,
        Err(report) => {
            let end = refuse(&report);
            // The path in the error is the last of several, and none that the user named.
            if arguments.choria_config.is_none() && !client.try_exists().unwrap_or(true) {
                say(format_args!(
                    "no client file is where Choria looks for one: name it with --choria-config"
                ));
            }
            return end;
        }
    };
    let config = &settings.config;
    let log = match Log::start(&config.logfile, config.log_format, config.loglevel) {
        Ok(log) => log,
        Err(error) => {
            say(format_args!("error: {}", chain(&error)));
            return end_of(&error, End::BadConfiguration);
        }
    };
    for warning in &settings.warnings {
        log::warn!(component = "config"; "{warning}");
    }
    let audit = match config.audit_log.as_deref().map(AuditFile::open).transpose() {
        Ok(audit) => audit,
        Err(error) => {
            tell(&log, &error);
            return end_of(&error, End::BadConfiguration);
        }
    };
    match serve(arguments, source, settings, audit, &log) {
        Ok(()) => End::Well,
        Err(error) => {
            tell(&log, &*error);
            end_of(&*error, End::Failed)
        }
    }
}

/// Shows what is wrong with a configuration.
fn refuse(report: &Report) -> End {
    for warning in &report.warnings {
        say(format_args!("warning: {warning}"));
    }
    for error in &report.errors {
        say(format_args!("error: {error}"));
    }
    if report.denied { End::NotPermitted } else { End::BadConfiguration }
}

/// Looks for all that would keep the daemon from working, and shows it.
fn check(arguments: Check) -> End {
    coredump::forbid();
    let surroundings = Surroundings::of_process();
    let (config, choria_config) = paths(arguments.files, &surroundings);
    let wanted = check::Wanted {
        config: &config,
        choria_config: &choria_config,
        pid: arguments.pid.as_deref(),
        is_offline: arguments.offline,
        is_moving: arguments.moving,
    };
    let findings = check::run(&wanted, &surroundings);
    let text = if arguments.json { findings.json() } else { findings.to_string() };
    if io::stdout().write_all(text.as_bytes()).is_err() {
        return End::Failed;
    }
    match findings.worst() {
        None => End::Well,
        Some(Kind::NotPermitted) => End::NotPermitted,
        Some(Kind::Configuration) => End::BadConfiguration,
        Some(Kind::Surroundings) => End::Failed,
        Some(Kind::OutOfReach) => End::OutOfReach,
    }
}

/// Looks what would be done to a node, and shows it; what the helper writes to standard error goes to ours.
fn try_node(arguments: Try) -> End {
    coredump::forbid();
    let surroundings = Surroundings::of_process();
    let (config, choria_config) = paths(arguments.files, &surroundings);
    let settings = match arguments.helper.as_deref().map(HelperCommand::parse).transpose() {
        Ok(None) => config::load(&config, &choria_config, &surroundings),
        Ok(Some(helper)) => {
            config::load_with_helper(&config, &choria_config, helper, &surroundings)
        }
        Err(error) => {
            say(format_args!("error: --helper: {error}"));
            return End::BadConfiguration;
        }
    };
    let settings = match settings {
        Ok(settings) => settings,
        Err(report) => return refuse(&report),
    };
    let node = &arguments.node;
    let log = Log::start(&LogTarget::Stderr, LogFormat::Auto, log::LevelFilter::Info);
    let (timeout, tell) = (arguments.timeout, say);
    // What is asked here takes a moment, and ends with the first signal.
    let begun = log
        .map_err(Box::<dyn Error>::from)
        .map(|_log| rehearsal::begin(node, settings, timeout, tell))
        .and_then(|begun| Ok((begun, Signals::install()?)));
    let (begun, signals) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            say(format_args!("error: {}", chain(&*error)));
            return End::Failed;
        }
    };
    let tried = begun.and_then(|begun| begun.run(&signals.drain));
    let is_verdict = tried.as_ref().is_ok_and(|shown| shown.would != Would::Fail);
    if is_over(&signals.drain) && !is_verdict {
        say(format_args!("interrupted: what would be done to {node} is not known"));
        return if signals.is_interrupted() { End::Interrupted } else { End::Terminated };
    }
    let shown = match tried {
        Ok(shown) => shown,
        Err(failed) => {
            say(format_args!("error: {}", chain(&failed)));
            if arguments.json {
                // The exit code says more than whether somebody reads it.
                let _ = io::stdout().write_all(Shown::untried(node, &failed).json().as_bytes());
            }
            return match failed {
                Failed::NoBroker(errors) if errors.iter().all(|error| error.kind.is_passing()) => {
                    End::OutOfReach
                }
                Failed::NoBroker(_) | Failed::Keys(_) => End::BadConfiguration,
                Failed::Rpc(_) | Failed::AtWork(_) | Failed::Served(_) | Failed::Unsaid(_) => {
                    End::Failed
                }
            };
        }
    };
    let text = if arguments.json { shown.json() } else { shown.to_string() };
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) if shown.would != Would::Fail => End::Well,
        Ok(()) | Err(_) => End::Failed,
    }
}

/// The two files that are meant; those of our package if none is named.
fn paths(files: Files, surroundings: &Surroundings) -> (PathBuf, PathBuf) {
    let Files { config, choria_config } = files;
    let choria_config = choria_config.unwrap_or_else(|| match config {
        None => CHORIA_CONFIG_USUAL.into(),
        Some(_) => default_file(surroundings),
    });
    (config.unwrap_or_else(|| CONFIG_USUAL.into()), choria_config)
}

/// Has a running daemon follow a command, and shows what came of it.
fn ask(arguments: &Ask) -> End {
    let path = match socket_of(arguments) {
        Ok(Some(path)) => path,
        Ok(None) => {
            say(format_args!("error: the daemon has no admin socket: admin_socket is empty"));
            return End::BadConfiguration;
        }
        Err(report) => return refuse(&report),
    };
    match client::ask(&path, &arguments.command, arguments.json) {
        // Whoever reads no more has what they wanted.
        Ok(text) => io::stdout().write_all(text.as_bytes()).map_or(End::Failed, |()| End::Well),
        Err(error) => {
            for line in chain(&error).lines() {
                say(format_args!("error: {line}"));
            }
            let is_named = arguments.socket.is_some() || arguments.config.is_some();
            if !is_named && is(&error, io::ErrorKind::NotFound) {
                say(format_args!("--config or --socket names another one"));
            }
            match error {
                client::Error::Unreachable { .. }
                    if is(&error, io::ErrorKind::PermissionDenied) =>
                {
                    End::NotPermitted
                }
                client::Error::Unreachable { .. } => End::OutOfReach,
                client::Error::Broken(_)
                | client::Error::Garbled(_)
                | client::Error::Refused(_) => End::Failed,
            }
        }
    }
}

/// Where the daemon listens, as far as we are told: by a flag, by its configuration, by the configuration of our package if that
/// says so.
fn socket_of(arguments: &Ask) -> Result<Option<PathBuf>, Report> {
    if let Some(path) = &arguments.socket {
        return Ok(Some(path.clone()));
    }
    let named = match &arguments.config {
        Some(path) => config::admin_socket_of(path)?,
        // That it can't be read is no reason to give up.
        None => config::admin_socket_of(Path::new(CONFIG_USUAL)).unwrap_or(AdminSocket::Usual),
    };
    Ok(socket::path_of(&named).map(Path::to_path_buf))
}

/// Where our package puts the configuration.
const CONFIG_USUAL: &str = "/etc/choria-provisioner/choria-provisioner.yaml";
const CHORIA_CONFIG_USUAL: &str = "/etc/choria-provisioner/choria.cfg";

/// The admin socket, if there shall be one. Nobody asked for the usual one, so it is no reason not to start.
fn bind_socket(wanted: &AdminSocket) -> Result<Option<Socket>, BindError> {
    match wanted {
        AdminSocket::Off => Ok(None),
        AdminSocket::At(path) => Socket::bind(path).map(Some),
        AdminSocket::Usual => {
            let path = Path::new(socket::USUAL);
            if missing_folder(wanted).is_some() {
                return Ok(None);
            }
            Ok(Socket::bind(path)
                .inspect_err(
                    |error| log::warn!(component = "admin"; "No admin socket: {}", chain(error)),
                )
                .ok())
        }
    }
}

/// The folder in which a socket would be if it were there.
fn missing_folder(wanted: &AdminSocket) -> Option<&'static Path> {
    let folder = Path::new(socket::USUAL).parent()?;
    (*wanted == AdminSocket::Usual && !folder.is_dir()).then_some(folder)
}

/// Runs the daemon until it is told to stop.
fn serve(
    arguments: &Run,
    source: Source,
    settings: config::Settings,
    audit: Option<AuditFile>,
    log: &Log,
) -> Result<(), Box<dyn Error>> {
    let config = settings.config;
    descriptors::raise(config.workers);
    // Before any work starts: a port in use must not end a daemon that has nodes in its hands.
    let monitor = match config.monitor_port {
        0 => None,
        _ => Some(places::listen(&config, &settings.places)?),
    };
    let admin = bind_socket(&config.admin_socket)?;
    let signals = Signals::install()?;
    // Lives until the end of this function, whichever way it ends.
    let pid = arguments.pid.as_deref().map(PidFile::write).transpose()?;
    if let Some(pid) = &pid {
        pid.remove_on_panic();
    }
    log::info!(component = "provisioner", version = VERSION; "Starting with {}", arguments.config.display());
    if let Some(folder) = missing_folder(&config.admin_socket) {
        let folder = folder.display();
        log::info!(component = "admin"; "No admin socket, since there is no {folder}; admin_socket says where else");
    }
    let setup = Setup {
        source,
        config,
        choria: settings.choria,
        monitor,
        admin,
        audit,
        version: VERSION,
        log: log.clone(),
    };
    daemon::run(setup, signals)?;
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

/// How we end with this error, which is otherwise one of this kind.
fn end_of(error: &(dyn Error + 'static), otherwise: End) -> End {
    let is_denied_port = error.downcast_ref().is_some_and(PortError::is_denied);
    if is_denied_port || is(error, io::ErrorKind::PermissionDenied) {
        End::NotPermitted
    } else if is(error, io::ErrorKind::BrokenPipe) {
        // Whoever reads the pipe may be about to.
        End::Failed
    } else {
        otherwise
    }
}

/// Whether the system's error behind this one is of that kind.
fn is(error: &(dyn Error + 'static), kind: io::ErrorKind) -> bool {
    let is_it = |error: &io::Error| error.kind() == kind;
    error.downcast_ref().is_some_and(is_it) || error.source().is_some_and(|cause| is(cause, kind))
}
