//! Draws a few curves side by side, as SVG.

use std::fmt::Write as _;

/// One diagram.
pub struct Panel {
    /// What it shows.
    pub title: String,
    /// What grows to the right.
    pub across: &'static str,
    /// Whether it doubles from one step to the next.
    pub doubles: bool,
    /// The curves.
    pub curves: Vec<Curve>,
}

/// One curve.
pub struct Curve {
    /// What it is of.
    pub name: String,
    /// In the order of their first figure.
    pub points: Vec<(f64, f64)>,
}

/// Pixels of a diagram without its margins.
const WIDTH: f64 = 300.0;
const HEIGHT: f64 = 220.0;
/// Pixels on the left of a diagram, where its figures stand.
const LEFT: f64 = 60.0;
/// Pixels above it, for its title.
const TOP: f64 = 40.0;
/// Pixels below it, for figures and names.
const BELOW: f64 = 100.0;
/// Steps of the upright axis.
const STEPS: usize = 4;
/// Told apart by everybody, and on light and dark ground.
const COLOURS: [&str; 4] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

/// All diagrams as one picture.
pub fn svg(panels: &[Panel]) -> String {
    let (width, height) = ((LEFT + WIDTH + 20.0) * panels.len() as f64, TOP + HEIGHT + BELOW);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    for (at, panel) in panels.iter().enumerate() {
        let left = (LEFT + WIDTH + 20.0) * at as f64 + LEFT;
        draw(&mut out, panel, left);
    }
    out.push_str("</svg>\n");
    out
}

fn draw(out: &mut String, panel: &Panel, left: f64) {
    let points = || panel.curves.iter().flat_map(|curve| &curve.points);
    let most = nice(points().map(|point| point.1).fold(0.0, f64::max));
    let place = |value: f64| if panel.doubles { value.max(1.0).log2() } else { value };
    let (from, to) = points()
        .map(|point| place(point.0))
        .fold((f64::MAX, f64::MIN), |(from, to), x| (from.min(x), to.max(x)));
    let span = if to > from { to - from } else { 1.0 };
    let x = |value: f64| left + (place(value) - from) / span * WIDTH;
    let y = |value: f64| TOP + HEIGHT * (1.0 - value / most);
    let bottom = TOP + HEIGHT;

    text(out, left, TOP - 16.0, "start", &panel.title);
    for step in 0..=STEPS {
        let value = most * step as f64 / STEPS as f64;
        let y = y(value);
        line(out, &[(left, y), (left + WIDTH, y)], "#dddddd", 1.0);
        text(out, left - 6.0, y + 4.0, "end", &short(value));
    }
    let mut across: Vec<f64> = match panel.doubles {
        true => points().map(|point| point.0).collect(),
        false => (0..=STEPS).map(|step| from + span * step as f64 / STEPS as f64).collect(),
    };
    across.sort_by(f64::total_cmp);
    across.dedup();
    // As many as can be read.
    for value in across.iter().step_by(across.len().div_ceil(8).max(1)) {
        text(out, x(*value), bottom + 16.0, "middle", &short(*value));
    }
    text(out, left + WIDTH / 2.0, bottom + 34.0, "middle", panel.across);
    for (number, curve) in panel.curves.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let points: Vec<(f64, f64)> = curve.points.iter().map(|&(a, b)| (x(a), y(b))).collect();
        line(out, &points, colour, 2.0);
        if points.len() <= 16 {
            for (x, y) in &points {
                let _ = writeln!(
                    out,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"
                );
            }
        }
        let y = bottom + 52.0 + 14.0 * number as f64;
        line(out, &[(left, y - 4.0), (left + 20.0, y - 4.0)], colour, 2.0);
        text(out, left + 26.0, y, "start", &curve.name);
    }
}

fn line(out: &mut String, points: &[(f64, f64)], colour: &str, width: f64) {
    let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let points = points.join(" ");
    let _ = writeln!(
        out,
        "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"/>"
    );
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>");
}

/// The next round figure that is not less.
fn nice(value: f64) -> f64 {
    let tens = 10_f64.powf(value.max(1e-9).log10().floor());
    let rounds = [1.0, 2.0, 4.0, 8.0, 10.0];
    rounds.iter().map(|round| round * tens).find(|round| *round >= value).unwrap_or(value)
}

fn short(value: f64) -> String {
    match value {
        value if value >= 10_000.0 => format!("{:.0}k", value / 1000.0),
        value if value >= 10.0 || value.fract() == 0.0 => format!("{value:.0}"),
        value => format!("{value:.1}"),
    }
}
