//! Operators' commands, given by the program to a daemon through its admin socket.

use std::process::{Command, Output};

use serde_json::Value;

use super::{Builder, Daemon, NatsServer};

/// A daemon with an admin socket in its folder.
pub fn builder(broker: &NatsServer) -> Builder {
    with_socket(Daemon::builder(&broker.address()))
}

/// Puts the admin socket into the daemon's folder.
pub fn with_socket(builder: Builder) -> Builder {
    let path = builder.dir().join("admin.sock");
    builder.set("admin_socket", path.display())
}

/// Runs a command of ours against `daemon`.
pub fn run(daemon: &Daemon, arguments: &[&str]) -> Output {
    let socket = daemon.dir().join("admin.sock");
    program().args(arguments).arg("--socket").arg(socket).output().expect("it can be started")
}

/// The program, to be given arguments.
pub fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_choria-provisioner"))
}

/// What the command says, which must be followed.
#[track_caller]
pub fn say(daemon: &Daemon, arguments: &[&str]) -> String {
    let output = run(daemon, arguments);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {said}{error}");
    assert_eq!(error, "", "{arguments:?}");
    said
}

/// The same, as JSON.
#[track_caller]
pub fn say_json(daemon: &Daemon, arguments: &[&str]) -> Value {
    let said = say(daemon, &[arguments, &["--json"]].concat());
    serde_json::from_str(&said).expect("it is JSON")
}

/// Its exit code and what it says of it.
pub fn fail(output: &Output) -> (Option<i32>, String) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    (
        output.status.code(),
        error.trim_start_matches("choria-provisioner: error: ").trim().to_owned(),
    )
}
