//! How long the stages of requests take. Each shard has counters of its own, which nobody else writes: an observation is
//! a few plain additions. The metrics page adds the shards up.

use std::sync::Arc;
use std::time::Duration;

use infera_shards::Counter;
use prometheus::core::{Collector, Desc};
use prometheus::proto::{Bucket, Histogram, LabelPair, Metric, MetricFamily, MetricType};

/// One part of a request's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// From the request's last byte to what routing needs of its body.
    Parse,
    /// From the body's members to the prompt's text.
    Render,
    /// From new text to token ids.
    Encode,
    /// Known beginnings and block hashes.
    Hash,
    /// Prefix depth of every worker.
    Query,
    /// Choice and booking, the query left out.
    Pick,
    /// Opening a connection to the worker; reused ones are not counted.
    Connect,
    /// From the pick to the first byte of the answer's body.
    FirstByte,
    /// Between a failed attempt and the next one; the first retry goes out without it.
    Pause,
}

impl Stage {
    pub const COUNT: usize = 9;

    pub const NAMES: [&'static str; Self::COUNT] =
        ["parse", "render", "encode", "hash", "query", "pick", "connect", "first_byte", "pause"];
}

/// Upper bounds of the buckets, nanoseconds: from a microsecond, which a pick takes, to seconds, which prefill takes.
const BOUNDS_NS: [u64; 15] = [
    1_000,
    3_000,
    10_000,
    30_000,
    100_000,
    300_000,
    1_000_000,
    3_000_000,
    10_000_000,
    30_000_000,
    100_000_000,
    300_000_000,
    1_000_000_000,
    3_000_000_000,
    10_000_000_000,
];

const NAME: &str = "infera_router_stage_seconds";
const HELP: &str = "Seconds that requests spent in each stage; first_byte is from the pick to the first byte of the \
                    answer's body, connect only where a connection was opened, pause before a second retry and further \
                    ones.";

/// One stage on one shard.
#[derive(Debug, Default)]
struct Cells {
    /// By bucket; the last is beyond all bounds.
    counts: [Counter; BOUNDS_NS.len() + 1],
    sum_ns: Counter,
}

/// All stages of one shard, on cache lines of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct ShardStages([Cells; Stage::COUNT]);

impl ShardStages {
    /// To be called by the shard itself only.
    pub fn observe(&self, stage: Stage, took: Duration) {
        let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let cells = &self.0[stage as usize];
        cells.counts[BOUNDS_NS.partition_point(|bound| *bound < took_ns)].add(1);
        cells.sum_ns.add(took_ns);
    }
}

/// The stages of every shard.
#[derive(Clone, Debug)]
pub struct Stages {
    shards: Arc<[ShardStages]>,
    desc: Desc,
}

impl Stages {
    pub fn new(shards: usize) -> Result<Self, prometheus::Error> {
        let desc = Desc::new(NAME.to_owned(), HELP.to_owned(), vec!["stage".to_owned()], Default::default())?;
        Ok(Self { shards: (0..shards.max(1)).map(|_| ShardStages::default()).collect(), desc })
    }

    /// The counters of one shard.
    pub fn of_shard(&self, shard: usize) -> Option<&ShardStages> {
        self.shards.get(shard)
    }

    fn histogram(&self, stage: usize) -> Histogram {
        let sum = |number: &dyn Fn(&Cells) -> u64| self.shards.iter().map(|shard| number(&shard.0[stage])).sum::<u64>();
        let mut histogram = Histogram::default();
        let mut cumulative = 0;
        let mut buckets = Vec::with_capacity(BOUNDS_NS.len());
        for (place, bound) in BOUNDS_NS.iter().enumerate() {
            cumulative += sum(&|cells| cells.counts[place].get());
            let mut bucket = Bucket::default();
            bucket.set_cumulative_count(cumulative);
            bucket.set_upper_bound(*bound as f64 / 1e9);
            buckets.push(bucket);
        }
        histogram.set_bucket(buckets);
        histogram.set_sample_count(cumulative + sum(&|cells| cells.counts[BOUNDS_NS.len()].get()));
        histogram.set_sample_sum(sum(&|cells| cells.sum_ns.get()) as f64 / 1e9);
        histogram
    }
}

impl Collector for Stages {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let metric = |(stage, name): (usize, &&str)| {
            let mut label = LabelPair::default();
            label.set_name("stage".to_owned());
            label.set_value((*name).to_owned());
            let mut metric = Metric::default();
            metric.set_label(vec![label]);
            metric.set_histogram(self.histogram(stage));
            metric
        };
        let mut family = MetricFamily::default();
        family.set_name(NAME.to_owned());
        family.set_help(HELP.to_owned());
        family.set_field_type(MetricType::HISTOGRAM);
        family.set_metric(Stage::NAMES.iter().enumerate().map(metric).collect());
        vec![family]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_add_up_and_every_observation_is_in_one_bucket() {
        let stages = Stages::new(2).unwrap();
        for (shard, took_ns) in [(0, 0), (0, 1_000), (1, 1_001), (1, 20_000_000_000)] {
            stages.of_shard(shard).unwrap().observe(Stage::Query, Duration::from_nanos(took_ns));
        }
        let families = stages.collect();
        let metrics = families[0].get_metric();
        let of = |name: &str| {
            let place = Stage::NAMES.iter().position(|known| *known == name).unwrap();
            metrics[place].get_histogram().clone()
        };
        let query = of("query");
        let cumulative: Vec<u64> = query.get_bucket().iter().map(|bucket| bucket.cumulative_count()).collect();
        assert_eq!((cumulative[0], cumulative[1], cumulative[14]), (2, 3, 3));
        assert_eq!((query.get_sample_count(), query.get_sample_sum()), (4, 20.000_002_001));
        assert_eq!(of("first_byte").get_sample_count(), 0);
        assert!(stages.of_shard(2).is_none());
    }
}
