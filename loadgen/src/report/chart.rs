//! Owns line charts and heat maps as SVG. Colours are classes of the page or of [`STYLE`]; every text is escaped here.
//! Never knows what it draws.

use std::fmt::Write;

/// Series told apart by colour; further ones begin anew, with another dash.
pub const COLORS: usize = 8;

/// Size of a chart in its own units: about CSS pixels on a phone, so that its texts stay readable there.
const WIDTH: f64 = 380.0;
const HEIGHT: f64 = 210.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 40.0;

/// Most labels along an axis.
const TICKS_MAX: usize = 6;

/// For a picture that stands alone, light or dark as the reader has it.
pub const STYLE: &str = include_str!("chart.css");

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    Linear,
    /// Values of 0 and below are not drawn.
    Logarithmic,
}

/// What runs along one side.
#[derive(Clone, Copy, Debug)]
pub struct Axis<'a> {
    pub label: &'a str,
    pub scale: Scale,
    /// Its ends, where the values do not decide.
    pub fixed: Option<(f64, f64)>,
}

impl<'a> Axis<'a> {
    /// From 0 to the largest value.
    pub fn linear(label: &'a str) -> Axis<'a> {
        Axis { label, scale: Scale::Linear, fixed: None }
    }

    pub fn logarithmic(label: &'a str) -> Axis<'a> {
        Axis { label, scale: Scale::Logarithmic, fixed: None }
    }

    pub fn share(label: &'a str) -> Axis<'a> {
        Axis { label, scale: Scale::Linear, fixed: Some((0.0, 1.0)) }
    }
}

/// One line. Points without a value interrupt it.
#[derive(Clone, Debug)]
pub struct Series {
    pub name: String,
    /// Chooses the colour.
    pub color: usize,
    /// A second kind of line in the same colour.
    pub is_dashed: bool,
    pub points: Vec<(f64, Option<f64>)>,
}

impl Series {
    /// Classes of its line and of its mark in a legend.
    pub fn class(&self) -> String {
        let dashed = self.is_dashed || self.color >= COLORS;
        format!("series c{}{}", self.color % COLORS, if dashed { " dashed" } else { "" })
    }
}

/// An axis with its ends and the place of each value.
struct Placed {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Placed {
    fn of(axis: &Axis, values: impl Iterator<Item = f64>, from: f64, to: f64) -> Option<Placed> {
        let is_drawn = |value: &f64| value.is_finite() && (axis.scale == Scale::Linear || *value > 0.0);
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        values.filter(is_drawn).for_each(|value| (low, high) = (low.min(value), high.max(value)));
        let (low, high) = match (axis.fixed, axis.scale) {
            (Some(ends), _) => ends,
            _ if low > high => return None,
            (None, Scale::Linear) => (0.0, if high > 0.0 { high } else { 1.0 }),
            (None, Scale::Logarithmic) if high > low => (low, high),
            (None, Scale::Logarithmic) => (low / 2.0, high * 2.0),
        };
        Some(Placed { scale: axis.scale, low, high, from, to })
    }

    fn place(&self, value: f64) -> Option<f64> {
        let share = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Logarithmic if value > 0.0 => (value / self.low).ln() / (self.high / self.low).ln(),
            Scale::Logarithmic => return None,
        };
        value.is_finite().then(|| self.from + (self.to - self.from) * share.clamp(0.0, 1.0))
    }

    fn ticks(&self) -> Vec<f64> {
        let steps = |multiples: &[f64]| -> Vec<f64> {
            let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
            let all = powers.flat_map(|power| multiples.iter().map(move |step| step * 10f64.powi(power)));
            all.filter(|tick| *tick >= self.low * 0.999 && *tick <= self.high * 1.001).collect()
        };
        match self.scale {
            Scale::Linear => {
                let step = round_step((self.high - self.low) / (TICKS_MAX - 1) as f64);
                let first = (self.low / step).ceil();
                (0..TICKS_MAX * 2)
                    .map(|count| (first + count as f64) * step)
                    .take_while(|it| *it <= self.high)
                    .collect()
            }
            Scale::Logarithmic => [&[1.0, 2.0, 5.0][..], &[1.0, 3.0], &[1.0]]
                .into_iter()
                .map(steps)
                .find(|ticks| ticks.len() <= TICKS_MAX)
                .unwrap_or_else(|| steps(&[1.0]).into_iter().step_by(2).collect()),
        }
    }
}

/// The next of 1, 2, 5, 10, 20, … that is not below `least`.
pub fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.max(1e-12).log10().floor());
    let found = [1.0, 2.0, 5.0].into_iter().map(|step| step * power).find(|step| *step >= least * 0.999_999);
    found.unwrap_or(10.0 * power)
}

/// Short enough for an axis.
pub fn short(value: f64) -> String {
    let trimmed = |value: f64, decimals: usize| {
        let text = format!("{value:.decimals$}");
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
    };
    match value.abs() {
        size if size >= 1e6 => format!("{}M", trimmed(value / 1e6, 1)),
        size if size >= 1e4 => format!("{}k", trimmed(value / 1e3, 1)),
        size if size >= 100.0 => trimmed(value, 0),
        size if size >= 1.0 => trimmed(value, 1),
        _ => trimmed(value, 3),
    }
}

/// Text as part of SVG or HTML.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            letter => out.push(letter),
        }
    }
    out
}

/// A chart of all series; nothing when there is no value to draw. `title` is read out, not shown.
pub fn lines(title: &str, x: &Axis, y: &Axis, series: &[Series]) -> Option<String> {
    let points = || series.iter().flat_map(|line| &line.points).filter(|(_, y)| y.is_some());
    let across = Placed::of(x, points().map(|(x, _)| *x), LEFT, WIDTH - RIGHT)?;
    let up = Placed::of(y, points().filter_map(|(_, y)| *y), HEIGHT - BOTTOM, TOP)?;
    let mut out = open(WIDTH, HEIGHT, title);
    let percent = y.fixed == Some((0.0, 1.0));
    for tick in up.ticks() {
        let label = if percent { format!("{:.0} %", tick * 100.0) } else { short(tick) };
        let at = up.place(tick).unwrap_or(TOP);
        let _ = write!(
            out,
            "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{:.1}\"/><text x=\"{:.1}\" y=\"{:.1}\" class=\"end\">{label}</text>",
            WIDTH - RIGHT,
            LEFT - 5.0,
            at + 4.0
        );
    }
    for tick in across.ticks() {
        let at = across.place(tick).unwrap_or(LEFT);
        let _ = write!(
            out,
            "<path class=\"grid\" d=\"M{at:.1} {TOP}V{:.1}\"/><text x=\"{at:.1}\" y=\"{:.1}\" class=\"middle\">{}</text>",
            HEIGHT - BOTTOM,
            HEIGHT - BOTTOM + 17.0,
            short(tick)
        );
    }
    let _ = write!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" class=\"end\">{}</text>",
        WIDTH - RIGHT,
        HEIGHT - 6.0,
        escape(x.label)
    );
    if !percent {
        let _ = write!(out, "<text x=\"2\" y=\"{:.1}\">{}</text>", HEIGHT - 6.0, escape(y.label));
    }
    for line in series {
        path(&mut out, line, &across, &up);
    }
    out.push_str("</svg>");
    Some(out)
}

fn open(width: f64, height: f64, title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" \
         aria-label=\"{}\">",
        escape(title)
    )
}

fn path(out: &mut String, line: &Series, across: &Placed, up: &Placed) {
    let mut data = String::new();
    let mut pen_is_down = false;
    let placed = line.points.iter().map(|(x, y)| Some((across.place(*x)?, up.place((*y)?)?)));
    let placed: Vec<Option<(f64, f64)>> = placed.collect();
    for (index, point) in placed.iter().enumerate() {
        let Some((x, y)) = point else {
            pen_is_down = false;
            continue;
        };
        let _ = write!(data, "{}{x:.1} {y:.1}", if pen_is_down { 'L' } else { 'M' });
        // A point with gaps on both sides would be invisible.
        let is_alone = !pen_is_down && placed.get(index + 1).is_none_or(Option::is_none);
        if is_alone {
            data.push_str("h2");
        }
        pen_is_down = true;
    }
    if !data.is_empty() {
        let _ =
            write!(out, "<path class=\"{}\" d=\"{data}\"><title>{}</title></path>", line.class(), escape(&line.name));
    }
}

/// A chart as a file of its own, with a legend inside.
pub fn standalone(title: &str, x: &Axis, y: &Axis, series: &[Series]) -> String {
    let drawn = lines(title, x, y, series).unwrap_or_else(|| open(WIDTH, HEIGHT, title) + "</svg>");
    let mut legend = format!("<style>{STYLE}</style><rect class=\"paper\" width=\"100%\" height=\"100%\"/>");
    for (number, line) in series.iter().enumerate() {
        let at = TOP + 12.0 + 14.0 * number as f64;
        let _ = write!(
            legend,
            "<path class=\"{}\" d=\"M{:.1} {:.1}h16\"/><text x=\"{:.1}\" y=\"{at:.1}\">{}</text>",
            line.class(),
            LEFT + 8.0,
            at - 4.0,
            LEFT + 28.0,
            escape(&line.name)
        );
    }
    let body = drawn.find('>').map_or(drawn.len(), |end| end + 1);
    format!("{}{legend}{}\n", &drawn[..body], &drawn[body..])
}

/// Rows of cells, darker for more. Values are shares of the darkest, 0 to 1; `label` of a row and `hint` of a cell are
/// made by the caller, columns are named by the numbers in `columns` where there are any.
pub struct Heat<'a> {
    pub title: &'a str,
    pub rows: Vec<HeatRow>,
    pub columns: Vec<String>,
    /// Below the columns.
    pub caption: &'a str,
}

pub struct HeatRow {
    pub label: String,
    /// Darkness, and what is said of the cell.
    pub cells: Vec<(f64, String)>,
}

/// Nothing for no cell.
pub fn heat(heat: &Heat) -> Option<String> {
    const ROW: f64 = 13.0;
    const LABEL: f64 = 84.0;
    let columns = heat.rows.iter().map(|row| row.cells.len()).max().filter(|count| *count > 0)?;
    let width = (WIDTH - LABEL - 4.0) / columns as f64;
    let bottom = ROW * heat.rows.len() as f64;
    let mut out = open(WIDTH, bottom + 32.0, heat.title);
    for (number, row) in heat.rows.iter().enumerate() {
        let top = ROW * number as f64;
        let _ = write!(out, "<text x=\"0\" y=\"{:.1}\">{}</text>", top + 10.0, escape(&clipped(&row.label)));
        for (column, (share, hint)) in row.cells.iter().enumerate() {
            let (share, x) = (share.clamp(0.0, 1.0), LABEL + width * column as f64);
            let _ = write!(
                out,
                "<rect class=\"cell\" x=\"{x:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" \
                 fill-opacity=\"{:.2}\"><title>{}</title></rect>",
                top + 0.5,
                (width - 0.5).max(0.5),
                ROW - 1.0,
                // What is there but rare must not look like nothing.
                if share > 0.0 { 0.1 + 0.9 * share } else { 0.0 },
                escape(hint)
            );
        }
    }
    let every = heat.columns.len().div_ceil(12).max(1);
    for (column, name) in heat.columns.iter().enumerate().step_by(every) {
        let x = LABEL + width * (column as f64 + 0.5);
        let _ = write!(out, "<text x=\"{x:.1}\" y=\"{:.1}\" class=\"middle\">{}</text>", bottom + 12.0, escape(name));
    }
    let _ = write!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" class=\"end\">{}</text></svg>",
        WIDTH - 4.0,
        bottom + 27.0,
        escape(heat.caption)
    );
    Some(out)
}

/// As much of a name as fits beside the cells: its end, where addresses differ.
fn clipped(name: &str) -> String {
    const LETTERS_MAX: usize = 13;
    let count = name.chars().count();
    if count <= LETTERS_MAX {
        return name.to_owned();
    }
    std::iter::once('…').chain(name.chars().skip(count - LETTERS_MAX + 1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &str, points: Vec<(f64, Option<f64>)>) -> Series {
        Series { name: name.to_owned(), color: 0, is_dashed: false, points }
    }

    #[test]
    fn ticks_are_round_and_few() {
        let check = |scale, low: f64, high: f64, expected: &[f64]| {
            let placed = Placed { scale, low, high, from: 0.0, to: 1.0 };
            let ticks = placed.ticks();
            let is_close = ticks.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-9 * b.abs().max(1.0));
            assert!(ticks.len() == expected.len() && is_close, "{low}..{high}: {ticks:?}");
        };
        check(Scale::Linear, 0.0, 1.0, &[0.0, 0.2, 0.4, 0.6, 0.8, 1.0]);
        check(Scale::Linear, 0.0, 7.3, &[0.0, 2.0, 4.0, 6.0]);
        check(Scale::Linear, 0.0, 0.001, &[0.0, 0.0002, 0.0004, 0.0006, 0.0008, 0.001]);
        check(Scale::Logarithmic, 3.0, 60.0, &[5.0, 10.0, 20.0, 50.0]);
        check(Scale::Logarithmic, 1.0, 500.0, &[1.0, 3.0, 10.0, 30.0, 100.0, 300.0]);
        check(Scale::Logarithmic, 0.1, 1e5, &[0.1, 10.0, 1000.0, 1e5]);
    }

    #[test]
    fn numbers_are_short() {
        let numbers = [0.0, 0.004, 0.25, 1.0, 12.5, 250.0, 9000.0, 12_000.0, 3_400_000.0].map(short);
        assert_eq!(numbers, ["0", "0.004", "0.25", "1", "12.5", "250", "9000", "12k", "3.4M"]);
    }

    #[test]
    fn gaps_interrupt_a_line_and_lone_points_are_seen() {
        let points = vec![(0.0, Some(1.0)), (1.0, Some(2.0)), (2.0, None), (3.0, Some(2.0)), (4.0, None)];
        let drawn = lines("t", &Axis::linear("s"), &Axis::linear("n"), &[series("a", points)]).unwrap();
        let data = drawn.split("class=\"series c0\" d=\"").nth(1).unwrap().split('"').next().unwrap();
        assert_eq!(data.matches('M').count(), 2, "{data}");
        assert_eq!(data.matches('L').count(), 1, "{data}");
        assert!(data.ends_with("h2"), "{data}");
    }

    #[test]
    fn names_are_text() {
        let hostile = "<script>\"'&";
        let points = vec![(1.0, Some(1.0)), (2.0, Some(2.0))];
        let axis = Axis::logarithmic(hostile);
        let drawn = standalone(hostile, &axis, &Axis::share("s"), &[series(hostile, points)]);
        let row = HeatRow { label: hostile.into(), cells: vec![(1.0, hostile.into())] };
        let map = Heat { title: hostile, rows: vec![row], columns: vec![hostile.into()], caption: hostile };
        for text in [drawn, heat(&map).unwrap()] {
            assert!(!text.contains("<script>") && text.contains("&lt;script&gt;&quot;&#39;&amp;"), "{text}");
        }
    }

    #[test]
    fn nothing_to_draw_is_no_picture() {
        let axis = Axis::logarithmic("ms");
        assert_eq!(lines("t", &axis, &Axis::share("s"), &[]), None);
        assert_eq!(
            lines("t", &axis, &Axis::share("s"), &[series("a", vec![(0.0, Some(0.5)), (f64::NAN, None)])]),
            None
        );
        assert!(heat(&Heat { title: "t", rows: vec![], columns: vec![], caption: "" }).is_none());
        assert!(standalone("t", &axis, &Axis::share("s"), &[]).ends_with("</svg>\n"));
    }
}
