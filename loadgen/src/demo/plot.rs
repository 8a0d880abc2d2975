//! Owns pictures of TTFT distributions: text and SVG. Never measures.

use crate::report::chart::{self, Axis, Series};

const COLUMNS: usize = 64;
const ROWS: usize = 14;

/// One curve: a name and its samples in milliseconds.
pub struct Curve<'a> {
    pub name: &'a str,
    pub samples_ms: Vec<f64>,
}

/// Log scale that covers all samples: lower end, upper end, both powers of ten times 1, 2 or 5.
fn range(curves: &[Curve]) -> Option<(f64, f64)> {
    let all = || curves.iter().flat_map(|curve| curve.samples_ms.iter().copied().filter(|it| *it > 0.0));
    let low = all().min_by(f64::total_cmp)?;
    let high = all().max_by(f64::total_cmp)?;
    let steps: Vec<f64> = (-3..7).flat_map(|power| [1.0, 2.0, 5.0].map(|step| step * 10f64.powi(power))).collect();
    let below = steps.iter().rev().copied().find(|step| *step <= low).unwrap_or(low);
    let above = steps.iter().copied().find(|step| *step >= high && *step > below).unwrap_or(high.max(below * 2.0));
    Some((below, above))
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Share of requests answered within each TTFT, one letter per curve (its name's first), `*` where they meet.
pub fn text(curves: &[Curve]) -> String {
    let Some((low, high)) = range(curves) else { return String::new() };
    let mut grid = vec![vec![' '; COLUMNS]; ROWS + 1];
    for curve in curves.iter().filter(|curve| !curve.samples_ms.is_empty()) {
        let (samples, mark) = (sorted(&curve.samples_ms), curve.name.chars().next().unwrap_or('?'));
        let positions: Vec<(usize, usize)> = (0..COLUMNS)
            .map(|column| {
                let at = low * (high / low).powf(column as f64 / (COLUMNS - 1) as f64);
                let share = samples.partition_point(|sample| *sample <= at) as f64 / samples.len() as f64;
                (ROWS - (share * ROWS as f64).round() as usize, column)
            })
            .collect();
        for (row, column) in positions {
            let cell = &mut grid[row][column];
            *cell = if *cell == ' ' { mark } else { '*' };
        }
    }
    let mut out = String::from("share of requests with a first token within x ms (log scale)\n");
    for (row, cells) in grid.into_iter().enumerate() {
        let label = match (ROWS - row) * 100 / ROWS {
            share if row % 7 == 0 => format!("{share:>4} %"),
            _ => " ".repeat(6),
        };
        let line: String = cells.into_iter().collect();
        out.push_str(format!("{label} |{line}").trim_end());
        out.push('\n');
    }
    let middle = (low * high).sqrt();
    out.push_str(&format!("{:>7}+{}\n", "", "-".repeat(COLUMNS)));
    out.push_str(&format!("{:>8}{:<30}{:<30.0}{:>4}\n", "", low, middle, high));
    let legend: Vec<String> =
        curves.iter().map(|curve| format!("{} = {}", curve.name.chars().next().unwrap_or('?'), curve.name)).collect();
    out.push_str(&format!("{:>8}{}\n", "", legend.join("   ")));
    out
}

/// The same picture as a self-contained SVG.
pub fn svg(curves: &[Curve]) -> String {
    let series = |(color, curve): (usize, &Curve)| {
        let samples = sorted(&curve.samples_ms);
        let share = |(index, sample): (usize, &f64)| (*sample, Some((index + 1) as f64 / samples.len() as f64));
        Series {
            name: curve.name.to_owned(),
            color,
            is_dashed: false,
            points: samples.iter().enumerate().map(share).collect(),
        }
    };
    let series: Vec<Series> = curves.iter().enumerate().map(series).collect();
    let title = "Time to first token: share of requests within x ms";
    chart::standalone(title, &Axis::logarithmic("ms to the first token"), &Axis::share("share"), &series)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curves() -> [Curve<'static>; 2] {
        let slow = (1..=100).map(|it| it as f64 * 10.0).collect();
        let fast = (1..=100).map(|it| it as f64).collect();
        [Curve { name: "round-robin", samples_ms: slow }, Curve { name: "kv-aware", samples_ms: fast }]
    }

    #[test]
    fn the_faster_curve_rises_first() {
        let picture = text(&curves());
        let top = picture.lines().nth(1).unwrap();
        assert!(top.find('k').unwrap() < top.find(['r', '*']).unwrap(), "{picture}");
        assert!(picture.contains("r = round-robin   k = kv-aware"));
        assert_eq!(range(&curves()), Some((1.0, 1000.0)));
    }

    #[test]
    fn svg_has_a_point_per_sample() {
        let picture = svg(&curves());
        assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"));
        let points = picture.split("class=\"series c1\" d=\"").nth(2).unwrap().split('"').next().unwrap();
        assert_eq!(points.matches(['M', 'L']).count(), 100, "{points}");
    }

    #[test]
    fn nothing_to_show_is_no_panic() {
        assert_eq!(text(&[]), "");
        assert!(svg(&[Curve { name: "x", samples_ms: vec![] }]).contains("</svg>"));
        assert!(!text(&[Curve { name: "x", samples_ms: vec![3.0] }]).is_empty());
    }
}
