//! Image affinity: which targets hold which images of a request. Owns the key of an image and the memory of
//! each target's recent images; never looks into an image, never knows an engine's hash.
//!
//! A tokenizer gives every image the same placeholder, so equal blocks would promise one image's KV to
//! another. Multimodal requests therefore drop the text overlap, and an image that a target holds counts as
//! [`IMAGE_BLOCKS`] blocks of the same cost formula.
//!
//! Reads and writes are plain atomics without a lock: a race between two shards can forget an image, which
//! costs locality once, and can never claim one that was not served.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use xxhash_rust::xxh3::xxh3_64;

use crate::fleet::{Fleet, TargetId};
use crate::limits::IMAGES_PER_TARGET_MAX;

/// Blocks that a held image saves, and a missing one costs. Source: the reference's multimodal weight.
pub const IMAGE_BLOCKS: u32 = 48;

/// Stable name of an image: XXH3-64 of its reference, which is an URL, or a whole `data:` URI (whose payload
/// stands for the image's bytes). Never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImageKey(u64);

impl ImageKey {
    /// Nothing for a reference that is blank.
    pub fn of_reference(reference: &str) -> Option<Self> {
        let reference = reference.trim();
        // 0 marks an empty place below; one image in 2^64 shares another's key for it.
        (!reference.is_empty()).then(|| Self(xxh3_64(reference.as_bytes()).max(1)))
    }

    pub const fn get(self) -> u64 {
        self.0
    }
}

/// The images that one target served last: least recently used out. A scan of at most 2 KiB answers a lookup,
/// about as fast as a hash table's probes at this size and without its deletions.
pub struct ImageLru {
    places: Box<[Place]>,
    /// Places in use, all at the front.
    used: AtomicUsize,
    clock: AtomicU64,
}

#[derive(Default)]
struct Place {
    key: AtomicU64,
    /// Clock of the last use; 0 for an empty place.
    used_at: AtomicU64,
}

impl ImageLru {
    /// Remembers the last `capacity` images.
    pub fn new(capacity: usize) -> Self {
        let places = (0..capacity.max(1)).map(|_| Place::default()).collect();
        Self { places, used: AtomicUsize::new(0), clock: AtomicU64::new(0) }
    }

    pub fn holds(&self, image: ImageKey) -> bool {
        self.find(image).is_some()
    }

    /// How many of a request's images the target holds.
    pub fn held(&self, images: &[ImageKey]) -> u32 {
        images.iter().filter(|image| self.holds(**image)).count() as u32
    }

    /// Makes the image the most recent one.
    pub fn record(&self, image: ImageKey) {
        let now = self.clock.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(place) = self.find(image) {
            place.used_at.store(now, Ordering::Relaxed);
            return;
        }
        // Each failure means that another shard took the place: a few tries, then the image is not remembered.
        for _ in 0..4 {
            let Some((index, oldest)) = self.oldest() else { return };
            let place = &self.places[index];
            if place.used_at.compare_exchange(oldest, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                place.key.store(image.0, Ordering::Relaxed);
                self.used.fetch_max(index + 1, Ordering::Relaxed);
                return;
            }
        }
    }

    fn find(&self, image: ImageKey) -> Option<&Place> {
        let used = self.used.load(Ordering::Relaxed);
        self.places[..used].iter().find(|place| place.key.load(Ordering::Relaxed) == image.0)
    }

    fn oldest(&self) -> Option<(usize, u64)> {
        let stamps = self.places.iter().map(|place| place.used_at.load(Ordering::Relaxed));
        stamps.enumerate().min_by_key(|(_, used_at)| *used_at)
    }
}

/// The images of every target that ever served one. A target's registration is its key, so that a restarted
/// worker starts empty, as its own cache does.
#[derive(Default)]
pub struct ImageTable {
    by_target: ArcSwap<HashMap<TargetId, Arc<ImageLru>>>,
}

impl ImageTable {
    /// How many of `images` the target holds.
    pub fn held(&self, target: TargetId, images: &[ImageKey]) -> u32 {
        self.by_target.load().get(&target).map_or(0, |lru| lru.held(images))
    }

    /// Remembers that the target serves these images. The first image of a target makes a new table, which is
    /// when targets that left `fleet` are dropped from it.
    pub fn record(&self, fleet: &Fleet, target: TargetId, images: &[ImageKey]) {
        let lru = match self.by_target.load().get(&target) {
            Some(lru) => lru.clone(),
            None => self.add(fleet, target),
        };
        images.iter().for_each(|image| lru.record(*image));
    }

    fn add(&self, fleet: &Fleet, target: TargetId) -> Arc<ImageLru> {
        let mut added = Arc::new(ImageLru::new(IMAGES_PER_TARGET_MAX));
        self.by_target.rcu(|table| {
            let known = |id: &TargetId| *id == target || fleet.targets.iter().any(|target| target.id == *id);
            let mut next: HashMap<_, _> =
                table.iter().filter(|(id, _)| known(id)).map(|(id, lru)| (*id, lru.clone())).collect();
            // Another shard may have been first.
            added = next.entry(target).or_insert_with(|| added.clone()).clone();
            next
        });
        added
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    use super::*;
    use crate::fleet::fixtures::{fleet, member};
    use crate::worker::Role;

    fn key(number: u64) -> ImageKey {
        ImageKey(number)
    }

    #[test]
    fn a_key_is_the_hash_of_the_trimmed_reference() {
        assert_eq!(ImageKey::of_reference(" https://host/cat.png\n"), ImageKey::of_reference("https://host/cat.png"));
        assert_ne!(
            ImageKey::of_reference("data:image/png;base64,AAAA"),
            ImageKey::of_reference("data:image/png;base64,AAAB")
        );
        assert_eq!(
            ImageKey::of_reference("https://host/cat.png").map(ImageKey::get),
            Some(xxh3_64(b"https://host/cat.png"))
        );
        assert_eq!(ImageKey::of_reference("  \t"), None);
    }

    #[test]
    fn agrees_with_a_list_in_order_of_use() {
        for seed in 0..32u64 {
            let mut random = SmallRng::seed_from_u64(seed);
            let capacity = random.random_range(1..20);
            let (lru, mut model) = (ImageLru::new(capacity), Vec::<u64>::new());
            for _ in 0..300 {
                let number = random.random_range(1..30u64);
                lru.record(key(number));
                model.retain(|known| *known != number);
                model.push(number);
                if model.len() > capacity {
                    model.remove(0);
                }
                let held: Vec<u64> = (1..30).filter(|number| lru.holds(key(*number))).collect();
                let mut expected = model.clone();
                expected.sort_unstable();
                assert_eq!(held, expected, "seed {seed} capacity {capacity}");
            }
        }
    }

    #[test]
    fn shards_recording_at_once_keep_to_the_capacity_and_claim_nothing_unserved() {
        let lru = ImageLru::new(64);
        std::thread::scope(|scope| {
            for shard in 0..8u64 {
                let lru = &lru;
                scope.spawn(move || (0..2_000u64).for_each(|turn| lru.record(key(1 + shard * 100 + turn % 100))));
            }
        });
        let held = (1..=800).filter(|number| lru.holds(key(*number))).count();
        assert!((1..=64).contains(&held), "{held}");
        assert!(!(801..2_000).any(|number| lru.holds(key(number))));
    }

    #[test]
    fn images_are_held_per_registration_and_departures_are_forgotten() {
        let both = fleet(&[member("a:1", "m", Role::Mixed), member("b:1", "m", Role::Mixed)]);
        let table = ImageTable::default();
        let images = [key(1), key(2), key(3)];
        let [a, b] = [both.targets[0].id, both.targets[1].id];
        assert_eq!(table.held(a, &images), 0);
        table.record(&both, a, &images[..2]);
        assert_eq!((table.held(a, &images), table.held(b, &images)), (2, 0));
        let mut only_b = fleet(&[member("x:1", "m", Role::Mixed), member("b:1", "m", Role::Mixed)]);
        only_b.targets.remove(0);
        table.record(&only_b, b, &images[2..]);
        assert_eq!((table.held(a, &images), table.held(b, &images)), (0, 1));
    }
}
