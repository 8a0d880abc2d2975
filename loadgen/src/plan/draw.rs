//! Owns the draws: a recipe and a seed to an endless row of sessions. The same seed gives the same sessions.

use rand::Rng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand_distr::{Distribution, Exp, LogNormal, Zipf};

use super::recipe::{Images, Recipe};
use super::{Kind, Piece, Session, Turn};
use crate::prompt::IMAGE_TOKENS;
use crate::seed::{self, mixed};

/// Sessions in order of beginning, without end.
pub struct Sessions {
    recipe: Recipe,
    seed: u64,
    draw: SmallRng,
    between: Exp<f64>,
    at_seconds: f64,
    number: u64,
    /// Pieces that nobody else has.
    own: u64,
    /// The pictures of the round under way, and which round that is.
    round: (u64, Vec<usize>),
}

impl Sessions {
    /// Sessions begin as a Poisson process of `rate` per second, which is positive.
    pub fn new(recipe: Recipe, rate: f64, seed: u64) -> Sessions {
        let draw = seed::generator(seed, &recipe.name);
        let between = Exp::new(rate).expect("a rate is positive");
        Sessions { recipe, seed, draw, between, at_seconds: 0.0, number: 0, own: 0, round: (u64::MAX, Vec::new()) }
    }

    /// Everything before the first message, and the group.
    fn opening(&mut self) -> (Vec<Piece>, Option<u64>) {
        let (mut pieces, mut group) = (Vec::new(), None);
        if let Some(shared) = self.recipe.shared.clone() {
            let rank = if shared.count > 1 { self.popular(shared.count, shared.zipf) } else { 0 };
            group = Some(rank);
            pieces.push(Piece { kind: Kind::System, name: mixed(self.seed, rank), tokens: shared.tokens });
        }
        if let Some(documents) = self.recipe.documents.clone() {
            let mut ranks: Vec<u64> =
                (0..documents.per_session).map(|_| self.popular(documents.count, documents.zipf)).collect();
            ranks.sort_unstable();
            ranks.dedup();
            group = ranks.first().copied().or(group);
            let document =
                |rank| Piece { kind: Kind::Document, name: mixed(self.seed, rank), tokens: documents.tokens };
            pieces.extend(ranks.into_iter().map(document));
        }
        if let Some(images) = self.recipe.images.clone() {
            let image = self.image(&images);
            group = Some(image);
            pieces.push(Piece { kind: Kind::Image, name: image_name(self.seed, image), tokens: IMAGE_TOKENS });
        }
        (pieces, group)
    }

    /// Number of the session's picture: below the count for those that come again.
    fn image(&mut self, images: &Images) -> u64 {
        let (count, place) = (images.count.max(1), self.number - 1);
        if seed::generator(mixed(self.seed, place), "new image").random_bool(images.new_share.clamp(0.0, 1.0)) {
            return count as u64 + place;
        }
        let round = place / count as u64;
        if self.round.0 != round {
            let mut order: Vec<usize> = (0..count).collect();
            order.shuffle(&mut seed::generator(self.seed ^ round.wrapping_mul(0x9e37_79b9_7f4a_7c15), "round"));
            self.round = (round, order);
        }
        self.round.1[place as usize % count] as u64
    }

    fn turns(&mut self, mut pieces: Vec<Piece>) -> Vec<Turn> {
        let recipe = self.recipe.clone();
        if recipe.task_tokens > 0.0 {
            pieces.push(self.own_piece(Kind::Message, recipe.task_tokens));
        }
        let many = recipe.turns > 1.0;
        let count = if many { self.count(recipe.turns) } else { 1 };
        let (mut turns, mut pause_ns) = (Vec::with_capacity(count), 0);
        for turn in 0..count {
            let kind = if recipe.has_tools && turn > 0 { Kind::ToolResult } else { Kind::Message };
            pieces.push(self.own_piece(kind, recipe.message_tokens));
            let answer_tokens = self.length(recipe.answer_tokens);
            let (pieces, answer) = (std::mem::take(&mut pieces), self.own_name());
            turns.push(Turn { pause_ns, pieces, answer, answer_tokens });
            if many && recipe.pause_s > 0.0 {
                pause_ns = (self.length(recipe.pause_s * 1000.0) as u64) * 1_000_000;
            }
        }
        turns
    }

    fn own_piece(&mut self, kind: Kind, tokens: f64) -> Piece {
        let (name, tokens) = (self.own_name(), self.length(tokens));
        Piece { kind, name, tokens }
    }

    fn own_name(&mut self) -> u64 {
        self.own += 1;
        mixed(!self.seed, self.own)
    }

    /// Rank of one of `count`, from 1.
    fn popular(&mut self, count: usize, exponent: f64) -> u64 {
        let law = Zipf::new(count.max(1) as f64, exponent.max(0.0)).expect("a positive count and exponent");
        law.sample(&mut self.draw) as u64
    }

    /// A length with this mean, at least 1.
    fn length(&mut self, mean: f64) -> usize {
        let sigma = self.recipe.spread;
        if sigma == 0.0 {
            return (mean.round() as usize).max(1);
        }
        let law = LogNormal::new(mean.ln() - sigma * sigma / 2.0, sigma).expect("a finite mean");
        (law.sample(&mut self.draw) as usize).max(1)
    }

    /// Turns of a session: uniform between half the mean and one and a half times it.
    fn count(&mut self, mean: f64) -> usize {
        let factor = if self.recipe.spread == 0.0 { 1.0 } else { self.draw.random_range(0.5..1.5) };
        (mean * factor).round().max(1.0) as usize
    }
}

/// Name of the picture with this number.
pub fn image_name(seed: u64, number: u64) -> u64 {
    mixed(seed, number)
}

impl Iterator for Sessions {
    type Item = Session;

    fn next(&mut self) -> Option<Session> {
        self.at_seconds += self.between.sample(&mut self.draw);
        self.number += 1;
        let (pieces, group) = self.opening();
        let turns = self.turns(pieces);
        Some(Session { number: self.number, at_ns: (self.at_seconds * 1e9) as u64, group, turns })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::super::{Documents, Shape};
    use super::*;

    fn sessions(recipe: Recipe, count: usize, seed: u64) -> Vec<Session> {
        Sessions::new(recipe, 10.0, seed).take(count).collect()
    }

    #[test]
    fn seeds_decide_and_means_are_kept() {
        for shape in [Shape::SharedPrompts, Shape::Rag, Shape::Chat, Shape::Agents, Shape::OnePrompt, Shape::Unique] {
            let (recipe, count) = (shape.recipe(), 2000);
            let made = sessions(recipe.clone(), count, 1);
            assert_eq!(made[..50], sessions(recipe.clone(), 50, 1));
            assert_ne!(made[..50], sessions(recipe.clone(), 50, 2));
            let turns: Vec<&Turn> = made.iter().flat_map(|it| &it.turns).collect();
            let mean = |sum: f64, count: usize| sum / count as f64;
            let near = |what: &str, found: f64, wanted: f64| {
                assert!((found / wanted - 1.0).abs() < 0.08, "{shape:?}, {what}: {found} for {wanted}");
            };
            near("turns", mean(turns.len() as f64, count), recipe.turns);
            near(
                "answers",
                mean(turns.iter().map(|it| it.answer_tokens as f64).sum(), turns.len()),
                recipe.answer_tokens,
            );
            let own = |it: &&Turn| it.pieces.last().map_or(0.0, |piece| piece.tokens as f64);
            near("messages", mean(turns.iter().map(own).sum(), turns.len()), recipe.message_tokens);
            near("arrivals", made[count - 1].at_ns as f64 / 1e9, count as f64 / 10.0);
            if recipe.turns > 1.0 {
                let paused: Vec<f64> = turns.iter().map(|it| it.pause_ns as f64 / 1e9).filter(|it| *it > 0.0).collect();
                near("pauses", mean(paused.iter().sum(), paused.len()), recipe.pause_s);
            }
        }
    }

    #[test]
    fn popular_prompts_and_documents_come_more_often() {
        let made = sessions(Shape::SharedPrompts.recipe(), 3000, 5);
        let mut counts = HashMap::<u64, usize>::new();
        made.iter().for_each(|it| *counts.entry(it.group.unwrap()).or_default() += 1);
        assert_eq!(counts.len(), 32);
        assert!(counts[&1] > 20 * counts[&32] / 2, "Zipf 1: {counts:?}");
        let Documents { count, per_session, .. } = Shape::Rag.recipe().documents.unwrap();
        for session in sessions(Shape::Rag.recipe(), 300, 5) {
            let documents: Vec<u64> =
                session.turns[0].pieces.iter().filter(|it| it.kind == Kind::Document).map(|it| it.name).collect();
            assert!((1..=per_session).contains(&documents.len()));
            assert_eq!(documents.iter().collect::<HashSet<_>>().len(), documents.len(), "once each");
            assert!(session.group.is_some_and(|rank| (1..=count as u64).contains(&rank)));
        }
    }

    #[test]
    fn pictures_come_in_rounds_and_new_ones_once() {
        let images = |new_share| Recipe {
            images: Some(Images { count: 7, bytes: 100, new_share }),
            ..Recipe::plain("images", 10.0, 4.0)
        };
        let made = sessions(images(0.0), 70, 3);
        for round in made.chunks(7) {
            let shown: HashSet<u64> = round.iter().filter_map(|it| it.group).collect();
            assert_eq!(shown, (0..7).collect(), "each once a round");
            assert!(round.iter().all(|it| it.turns[0].pieces[0].name == image_name(3, it.group.unwrap())));
        }
        let shown: Vec<u64> = sessions(images(0.25), 1000, 3).iter().filter_map(|it| it.group).collect();
        let new: HashSet<&u64> = shown.iter().filter(|it| **it >= 7).collect();
        assert_eq!(new.len(), shown.iter().filter(|it| **it >= 7).count(), "nobody sees a new one again");
        assert!((200..300).contains(&new.len()), "{}", new.len());
    }

    #[test]
    fn without_spread_everything_is_its_mean() {
        let recipe = Recipe { turns: 3.0, pause_s: 0.5, ..Recipe::shared_prefix(4, 0.0, 30, 20, 8) };
        for session in sessions(recipe, 20, 9) {
            let pieces: Vec<Vec<usize>> =
                session.turns.iter().map(|it| it.pieces.iter().map(|it| it.tokens).collect()).collect();
            assert_eq!(pieces, [vec![30, 20], vec![20], vec![20]]);
            let rest: Vec<(u64, usize)> = session.turns.iter().map(|it| (it.pause_ns, it.answer_tokens)).collect();
            assert_eq!(rest, [(0, 8), (500_000_000, 8), (500_000_000, 8)]);
        }
    }
}
