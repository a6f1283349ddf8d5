//! What one version comparison costs, from two texts to their order, ours against a straightforward one that allocates.
//!
//! `cargo bench --bench version` prints nanoseconds. Behind `--`, a way and a count compare the usual pairs that often and
//! print nothing, for a tool that counts instructions: `-- ours 100000`.

#![expect(clippy::print_stdout, reason = "the figures are what it is for")]

use std::cmp::Ordering;
use std::hint::black_box;
use std::time::{Duration, Instant};

use choria_provisioner::version::Version;

/// The straightforward way, as the original does it: owned parts, each cut into a list of owned segments.
mod plain {
    use std::cmp::Ordering;

    #[derive(Debug, PartialEq, Eq)]
    pub struct Version {
        epoch: u64,
        version: String,
        release: Option<String>,
    }

    impl Version {
        pub fn parse(text: &str) -> Version {
            let (epoch, rest) = match text.split_once(':') {
                Some((epoch, rest)) if epoch.bytes().all(|b| b.is_ascii_digit()) => {
                    (epoch.parse().unwrap_or(0), rest)
                }
                _ => (0, text),
            };
            match rest.rsplit_once('-') {
                Some((version, release)) => Version {
                    epoch,
                    version: version.to_owned(),
                    release: Some(release.to_owned()),
                },
                None => Version { epoch, version: rest.to_owned(), release: None },
            }
        }

        pub fn compare(&self, other: &Version) -> Ordering {
            if self == other {
                return Ordering::Equal;
            }
            let releases = || match (&self.release, &other.release) {
                (Some(one), Some(two)) => compare(one, two),
                (one, two) => one.is_some().cmp(&two.is_some()),
            };
            let versions = || compare(&self.version, &other.version);
            self.epoch.cmp(&other.epoch).then_with(versions).then_with(releases)
        }
    }

    fn segments(text: &str) -> Vec<String> {
        let kind = |c: char| match c {
            '~' | '^' => 0,
            '0'..='9' => 1,
            'a'..='z' | 'A'..='Z' => 2,
            _ => 3,
        };
        let mut segments: Vec<String> = Vec::new();
        let mut last = 3;
        for c in text.chars() {
            match (kind(c), segments.last_mut()) {
                (3, _) => {}
                (now @ (1 | 2), Some(segment)) if now == last => segment.push(c),
                _ => segments.push(c.to_string()),
            }
            last = kind(c);
        }
        segments
    }

    fn compare(one: &str, two: &str) -> Ordering {
        /// Where a segment stands among others of its place; the end stands between `~` and `^`.
        fn rank(segment: Option<&String>) -> u8 {
            match segment.and_then(|segment| segment.chars().next()) {
                Some('~') => 0,
                None => 1,
                Some('^') => 2,
                Some('0'..='9') => 4,
                Some(_) => 3,
            }
        }

        let (ones, twos) = (segments(one), segments(two));
        for at in 0..=ones.len().max(twos.len()) {
            let (one, two) = (ones.get(at), twos.get(at));
            let ranks = rank(one).cmp(&rank(two));
            let (Ordering::Equal, Some(one), Some(two)) = (ranks, one, two) else { return ranks };
            let order = if rank(Some(one)) == 4 {
                let (one, two) = (one.trim_start_matches('0'), two.trim_start_matches('0'));
                one.len().cmp(&two.len()).then_with(|| one.cmp(two))
            } else {
                one.cmp(two)
            };
            if order.is_ne() {
                return order;
            }
        }
        Ordering::Equal
    }
}

/// What a provisioner compares: the version a node reports, and the one its helper wants.
const USUAL: [(&str, &str); 8] = [
    ("0.29.4", "0.29.4"),
    ("0.28.0", "0.29.4"),
    ("0.29.4", "0.29.10"),
    ("0.29.4", "0.30.0"),
    ("0.99.0.20221201", "0.99.0.20221202"),
    ("0.29.4", "0.29.4-1"),
    ("0.29.4-1.el9", "0.29.4-2.el9"),
    ("0.29.4~rc1", "0.29.4"),
];

/// How long each way is measured, in each round.
const ROUND: Duration = Duration::from_millis(100);

/// The best of so many rounds counts: the others were disturbed.
const ROUNDS: usize = 7;

fn ours(one: &str, two: &str) -> Ordering {
    Version::parse(one).cmp(&Version::parse(two))
}

fn plain(one: &str, two: &str) -> Ordering {
    plain::Version::parse(one).compare(&plain::Version::parse(two))
}

fn main() {
    let table: Vec<(&str, &str)> = include_str!("../tests/vectors/rpmvercmp.tsv")
        .lines()
        .skip(1)
        .map(|row| {
            let mut columns = row.split('\t');
            (columns.next().unwrap_or_default(), columns.next().unwrap_or_default())
        })
        .collect();

    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    if let [way, count] = arguments.as_slice() {
        let compare = if way == "ours" { ours } else { plain };
        for _ in 0..count.parse().unwrap_or(1) {
            run(&USUAL, compare);
        }
        return;
    }

    println!("{:<28} {:>8} {:>8} {:>7}", "ns per comparison", "plain", "ours", "ratio");
    for pair in &USUAL {
        report(&format!("{} {}", pair.0, pair.1), std::slice::from_ref(pair));
    }
    report("all of these", &USUAL);
    report("rpm's own table", &table);
}

fn report(name: &str, pairs: &[(&str, &str)]) {
    for (one, two) in pairs {
        assert_eq!(ours(one, two), plain(one, two), "{one} against {two}");
    }
    // In turns, so that what disturbs one disturbs the other.
    let (mut ours_ns, mut plain_ns) = (f64::MAX, f64::MAX);
    for _ in 0..ROUNDS {
        ours_ns = ours_ns.min(measure(pairs, ours));
        plain_ns = plain_ns.min(measure(pairs, plain));
    }
    println!("{name:<28} {plain_ns:>8.1} {ours_ns:>8.1} {:>7.1}", plain_ns / ours_ns);
}

/// Nanoseconds per comparison.
fn measure(pairs: &[(&str, &str)], compare: impl Fn(&str, &str) -> Ordering + Copy) -> f64 {
    const BATCH: usize = 1_000;

    let started = Instant::now();
    let mut batches = 0;
    while started.elapsed() < ROUND {
        for _ in 0..BATCH.div_ceil(pairs.len()) {
            run(pairs, compare);
        }
        batches += 1;
    }
    let comparisons = batches * BATCH.div_ceil(pairs.len()) * pairs.len();
    started.elapsed().as_secs_f64() * 1e9 / comparisons as f64
}

fn run(pairs: &[(&str, &str)], compare: impl Fn(&str, &str) -> Ordering) {
    for (one, two) in pairs {
        black_box(compare(black_box(one), black_box(two)));
    }
}
