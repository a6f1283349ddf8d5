//! What a shell needs to complete our arguments, made of the same table that they are read by.
//!
//! Words only: no daemon is asked for the names of its nodes, since nobody wants to wait for a key.

use std::fmt::Write as _;

use argh::SubCommands as _;

use super::{Commands, PROGRAM, RUN, SPECS, Spec};
use crate::ops::status::{Sort, Which};

/// A shell that we know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shell {
    /// GNU Bash.
    Bash,
    /// The Z shell.
    Zsh,
    /// fish.
    Fish,
}

impl Shell {
    /// All of them.
    pub const ALL: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

    /// Its name.
    pub fn word(self) -> &'static str {
        match self {
            Shell::Bash => "bash",
            Shell::Zsh => "zsh",
            Shell::Fish => "fish",
        }
    }

    /// The shell called `word`.
    pub fn parse(word: &str) -> Option<Shell> {
        Shell::ALL.into_iter().find(|shell| shell.word() == word)
    }

    /// The script that teaches it our arguments.
    pub fn script(self) -> String {
        let mut out =
            format!("# Made by {PROGRAM} --completion {}; changes are lost.\n", self.word());
        match self {
            Shell::Bash => bash(&mut out),
            Shell::Zsh => {
                out.insert_str(0, &format!("#compdef {PROGRAM}\n"));
                zsh(&mut out);
            }
            Shell::Fish => fish(&mut out),
        }
        out
    }
}

/// What may follow a flag.
enum Value {
    /// Nothing.
    None,
    /// A file.
    File,
    /// One of these.
    Words(Vec<&'static str>),
    /// Something that nobody can guess.
    Other,
}

impl Value {
    fn of(flag: &str) -> Value {
        match flag {
            // A helper is a program in a file, and whatever follows it.
            "config" | "choria-config" | "pid" | "socket" | "helper" => Value::File,
            "state" => Value::Words(Which::ALL.map(Which::word).to_vec()),
            "sort" => Value::Words(Sort::ALL.map(Sort::word).to_vec()),
            "completion" => Value::Words(Shell::ALL.map(Shell::word).to_vec()),
            flag if SPECS.iter().any(|spec| spec.with_value.contains(&flag)) => Value::Other,
            _ => Value::None,
        }
    }
}

/// All flags that take a value, each once.
fn flags_with_value() -> Vec<&'static str> {
    let mut flags: Vec<&str> = SPECS.iter().flat_map(|spec| spec.with_value).copied().collect();
    flags.sort_unstable();
    flags.dedup();
    flags
}

/// The commands, each with what it does.
fn commands() -> impl Iterator<Item = (&'static Spec, &'static str)> {
    SPECS.iter().map(|spec| {
        let known = Commands::COMMANDS.iter().find(|command| command.name == spec.word);
        (spec, known.map_or("Runs the daemon.", |command| command.description))
    })
}

/// The flags of a command, written as they are given.
fn flags(spec: &Spec) -> String {
    let flags: Vec<String> = spec.flags().map(|flag| format!("--{flag}")).collect();
    flags.join(" ")
}

// Writing to memory can't fail, here and below.
fn bash(out: &mut String) {
    let words: Vec<&str> = SPECS.iter().map(|spec| spec.word).collect();
    let words = words.join(" ");
    let with_value: Vec<String> =
        flags_with_value().into_iter().map(|flag| format!("--{flag}")).collect();
    let _ = write!(
        out,
        r#"_choria_provisioner() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command= flags at word
    # An equals sign is a word of its own.
    [[ $cur == = ]] && cur=
    [[ $prev == = ]] && prev=${{COMP_WORDS[COMP_CWORD-2]}}
    COMPREPLY=()
    case $prev in
"#
    );
    for flag in flags_with_value() {
        let reply = match Value::of(flag) {
            Value::File => {
                "compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- \"$cur\")"
                    .to_owned()
            }
            Value::Words(words) => {
                format!("mapfile -t COMPREPLY < <(compgen -W \"{}\" -- \"$cur\")", words.join(" "))
            }
            Value::None | Value::Other => ":".to_owned(),
        };
        let _ = writeln!(out, "    --{flag})\n        {reply}\n        return ;;");
    }
    let _ = write!(
        out,
        r#"    esac
    for ((at = 1; at < COMP_CWORD; at++)); do
        word=${{COMP_WORDS[at]}}
        case $word in
        {}) [[ ${{COMP_WORDS[at+1]}} == = ]] && ((at++)); ((at++)) ;;
        {}) command=$word; break ;;
        esac
    done
    case $command in
"#,
        with_value.join("|"),
        words.replace(' ', "|"),
    );
    for (spec, _) in commands().filter(|(spec, _)| spec.word != RUN.word) {
        let _ = writeln!(out, "    {}) flags=\"{}\" ;;", spec.word, flags(spec));
    }
    let _ = write!(
        out,
        r#"    *) flags="{}" ;;
    esac
    if [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$cur")
    elif [[ -z $command ]]; then
        mapfile -t COMPREPLY < <(compgen -W "{words} help" -- "$cur")
    fi
}}
complete -F _choria_provisioner {PROGRAM}
"#,
        flags(&RUN)
    );
}

fn zsh(out: &mut String) {
    let about = |text: &str| text.replace('\'', "'\\''").replace(':', "\\:");
    out.push_str("_choria-provisioner() {\n    local -a commands=(\n");
    for (spec, text) in commands() {
        let _ = writeln!(out, "        '{}:{}'", spec.word, about(text));
    }
    out.push_str(
        r#"    )
    local word command=run state
    for word in "${(@)words[2,CURRENT-1]}"; do
        if (( ${commands[(I)$word:*]} )); then
            command=$word
            break
        fi
    done
    case $command in
"#,
    );
    for (spec, _) in commands() {
        let _ = write!(out, "    {})\n        _arguments", spec.word);
        for flag in spec.flags() {
            let value = match Value::of(flag) {
                Value::None => String::new(),
                Value::File => "=:file:_files".to_owned(),
                Value::Words(words) => format!("=:{flag}:({})", words.join(" ")),
                Value::Other => format!("=:{flag}: "),
            };
            let _ = write!(out, " '--{flag}{value}'");
        }
        out.push_str(match spec.word == RUN.word {
            true => " '1: :->command' ;;\n",
            false => " '1: : ' '*: : ' ;;\n",
        });
    }
    out.push_str(
        r#"    esac
    [[ $state == command ]] && _describe command commands
    return 0
}
_choria-provisioner "$@"
"#,
    );
}

fn fish(out: &mut String) {
    let quoted = |text: &str| format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"));
    let others: Vec<&str> =
        SPECS.iter().map(|spec| spec.word).filter(|word| *word != RUN.word).collect();
    let none = quoted(&format!("not __fish_seen_subcommand_from {}", others.join(" ")));
    let begin =
        quoted(&format!("not __fish_seen_subcommand_from {} {}", RUN.word, others.join(" ")));
    let _ = writeln!(out, "complete -c {PROGRAM} -f");
    for (spec, text) in commands() {
        let _ =
            writeln!(out, "complete -c {PROGRAM} -n {begin} -a {} -d {}", spec.word, quoted(text));
    }
    for (spec, _) in commands() {
        let seen = match spec.word == RUN.word {
            true => none.clone(),
            false => quoted(&format!("__fish_seen_subcommand_from {}", spec.word)),
        };
        for flag in spec.flags() {
            let value = match Value::of(flag) {
                Value::None => String::new(),
                Value::File => " -r -F".to_owned(),
                Value::Words(words) => format!(" -x -a {}", quoted(&words.join(" "))),
                Value::Other => " -x".to_owned(),
            };
            let _ = writeln!(out, "complete -c {PROGRAM} -n {seen} -l {flag}{value}");
        }
    }
}
