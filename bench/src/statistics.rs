//! Medians, quartiles and percentiles. Never knows what it summarises.

use serde::Serialize;

/// Middle and spread of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub median: f64,
    /// First and third quartile.
    pub q1: f64,
    pub q3: f64,
    pub minimum: f64,
    pub maximum: f64,
    pub samples: usize,
}

/// `None` for an empty sample.
pub fn spread(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let (minimum, maximum) = (*values.first()?, *values.last()?);
    let [q1, median, q3] = [0.25, 0.5, 0.75].map(|quantile| interpolated(&values, quantile));
    Some(Spread { median, q1, q3, minimum, maximum, samples: values.len() })
}

/// Linear interpolation between the neighbours of the wanted rank; `sorted` must not be empty.
fn interpolated(sorted: &[f64], quantile: f64) -> f64 {
    let rank = quantile * (sorted.len() - 1) as f64;
    let (low, high) = (rank.floor() as usize, rank.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * (rank - low as f64)
}

/// Nearest-rank percentile of sorted values; 0 for none.
pub fn percentile(sorted: &[u64], percent: f64) -> u64 {
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).or(sorted.last()).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_interpolate() {
        let all = spread([4.0, 1.0, 3.0, 2.0, 5.0]).unwrap();
        assert_eq!(all, Spread { median: 3.0, q1: 2.0, q3: 4.0, minimum: 1.0, maximum: 5.0, samples: 5 });
        assert_eq!(spread([1.0, 2.0]).unwrap().median, 1.5);
        assert_eq!(spread([7.0]).unwrap().q3, 7.0);
        assert!(spread([]).is_none());
    }

    #[test]
    fn percentiles_by_nearest_rank() {
        let values: Vec<u64> = (1..=100).collect();
        assert_eq!((percentile(&values, 50.0), percentile(&values, 99.0), percentile(&values, 100.0)), (50, 99, 100));
        assert_eq!(percentile(&[], 50.0), 0);
        assert_eq!(percentile(&[9], 1.0), 9);
    }
}
