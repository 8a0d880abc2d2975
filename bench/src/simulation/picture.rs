//! The comparison as one SVG picture: per workload, bars of the hit rate and figures beside them. Never measures.

use std::fmt::Write;

use super::summary::{Row, Summary};

const LABEL_WIDTH: f64 = 230.0;
const BAR_WIDTH: f64 = 330.0;
const TEXT_WIDTH: f64 = 330.0;
const ROW_HEIGHT: f64 = 22.0;
const HEAD_HEIGHT: f64 = 62.0;

/// The whole picture. Bars are drawn to the share of prompt tokens that were cached, with the range over seeds at their
/// ends; the dark line is the oracle, the light one the best possible for the fleet's memory, at most the full width.
pub fn svg(summaries: &[Summary], highlighted: &str) -> String {
    let height: f64 = summaries.iter().map(panel_height).sum();
    let width = LABEL_WIDTH + BAR_WIDTH + TEXT_WIDTH;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    let mut top = 0.0;
    for summary in summaries {
        panel(&mut out, summary, top, highlighted);
        top += panel_height(summary);
    }
    out + "</svg>\n"
}

fn panel_height(summary: &Summary) -> f64 {
    HEAD_HEIGHT + ROW_HEIGHT * summary.rows.len() as f64 + 10.0
}

fn panel(out: &mut String, summary: &Summary, top: f64, highlighted: &str) {
    // Where one rule is near to the bound, the bound is the right end.
    let full = summary.best_for_memory.median.max(f64::MIN_POSITIVE);
    let x = |hit_rate: f64| LABEL_WIDTH + BAR_WIDTH * (hit_rate / full).min(1.0);
    text(out, (8.0, top + 16.0), "font-weight=\"bold\"", &summary.name);
    let figures = LABEL_WIDTH + BAR_WIDTH + 12.0;
    text(out, (figures, top + 50.0), "fill=\"#555\"", "hit rate · TTFT p50, p99 · goodput");
    let bottom = top + panel_height(summary) - 8.0;
    for (value, colour, name, label) in [
        (summary.oracle.median, "#222", "oracle", top + 50.0),
        (summary.best_for_memory.median, "#bbb", "best for the memory", top + 35.0),
    ] {
        let at = x(value);
        let _ = writeln!(
            out,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{bottom:.1}\" stroke=\"{colour}\"/>",
            top + 54.0
        );
        text(out, (at, label), "text-anchor=\"end\" fill=\"#555\"", &format!("{name} {value:.3}"));
    }
    for (number, row) in summary.rows.iter().enumerate() {
        let y = top + HEAD_HEIGHT + ROW_HEIGHT * number as f64;
        let colour = if row.rule == highlighted { "#1b7f4d" } else { "#8aa6c1" };
        text(out, (LABEL_WIDTH - 8.0, y + 12.0), "text-anchor=\"end\"", &row.rule);
        let _ = writeln!(
            out,
            "<rect x=\"{LABEL_WIDTH}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"15\" fill=\"{colour}\" \
             fill-opacity=\"0.85\"/>",
            x(row.hit_rate.median) - LABEL_WIDTH
        );
        let (low, high, middle) = (x(row.hit_rate.minimum), x(row.hit_rate.maximum), y + 7.5);
        let _ = writeln!(
            out,
            "<path d=\"M{low:.1} {middle}H{high:.1}M{low:.1} {}v7M{high:.1} {}v7\" stroke=\"#222\" fill=\"none\"/>",
            middle - 3.5,
            middle - 3.5
        );
        text(out, (figures, y + 12.0), "", &beside(row));
    }
}

fn beside(row: &Row) -> String {
    format!(
        "{:.3} · {:.2} s, {:.1} s · {:.1} %",
        row.hit_rate.median,
        row.ttft_p50_s.median,
        row.ttft_p99_s.median,
        row.goodput.median * 100.0
    )
}

fn text(out: &mut String, (x, y): (f64, f64), attributes: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" {attributes}>{text}</text>");
}
