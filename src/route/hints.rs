//! Cache hints: how long a client wants its prompt kept, and what that means for the overlap weight. Never
//! refuses a request: a hint that cannot be read is no hint.

/// How long the client asks its prefix to be kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Retention {
    /// The client said nothing.
    #[default]
    Unsaid,
    /// The client said that it wants none.
    None,
    Short,
    Long,
}

impl Retention {
    /// What the overlap weight is multiplied with. Source: the reference's retention factors.
    pub const fn weight_factor(self) -> f64 {
        match self {
            Retention::Long => 2.0,
            Retention::None => 0.1,
            Retention::Short | Retention::Unsaid => 1.0,
        }
    }

    /// As the pick line spells it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Retention::Long => "long",
            Retention::Short => "short",
            Retention::None | Retention::Unsaid => "none",
        }
    }

    /// A value of `prompt_cache_retention`; nothing for one that is not known.
    pub fn of_member(value: &str) -> Option<Self> {
        let value = value.trim();
        let is = |names: &[&str]| names.iter().any(|name| value.eq_ignore_ascii_case(name));
        if is(&["24h", "1h", "long"]) {
            Some(Retention::Long)
        } else if is(&["5m", "short"]) {
            Some(Retention::Short)
        } else if is(&["none", "off", "disabled"]) {
            Some(Retention::None)
        } else {
            None
        }
    }

    /// A `cache_control` mark of a block, by its type and time to live.
    pub fn of_mark(kind: Option<&str>, ttl: Option<&str>) -> Option<Self> {
        if kind != Some("ephemeral") {
            return None;
        }
        match ttl {
            Some("1h" | "1hr" | "60m" | "3600s" | "long") => Some(Retention::Long),
            None | Some("5m" | "5min" | "300s" | "short") => Some(Retention::Short),
            Some(_) => None,
        }
    }
}

/// The hints of one body as they are found; a repeated member replaces its earlier value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// `prompt_cache_retention` where it is a string: what it means, if anything.
    pub member: Option<Option<Retention>>,
    /// Whether `prompt_cache_key` is there and not null.
    pub has_key: bool,
    /// Strongest mark in `system`, `tools` and `messages`.
    pub marks: [Retention; 3],
}

impl Found {
    /// The strongest of all. A retention member that is not known silences the key, as in the reference.
    pub fn retention(&self) -> Retention {
        let of_key = if self.has_key { Retention::Short } else { Retention::Unsaid };
        let of_member = self.member.map_or(of_key, Option::unwrap_or_default);
        self.marks.into_iter().fold(of_member, Retention::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_and_marks_mean_what_the_reference_says() {
        for (value, expected) in [
            ("24h", Some(Retention::Long)),
            (" 1H ", Some(Retention::Long)),
            ("long", Some(Retention::Long)),
            ("5m", Some(Retention::Short)),
            ("SHORT", Some(Retention::Short)),
            ("off", Some(Retention::None)),
            ("disabled", Some(Retention::None)),
            ("in_memory", None),
            ("", None),
        ] {
            assert_eq!(Retention::of_member(value), expected, "{value:?}");
        }
        for (kind, ttl, expected) in [
            (Some("ephemeral"), None, Some(Retention::Short)),
            (Some("ephemeral"), Some("5m"), Some(Retention::Short)),
            (Some("ephemeral"), Some("1h"), Some(Retention::Long)),
            (Some("ephemeral"), Some("2h"), None),
            (Some("persistent"), Some("1h"), None),
            (None, Some("1h"), None),
        ] {
            assert_eq!(Retention::of_mark(kind, ttl), expected, "{kind:?} {ttl:?}");
        }
    }

    #[test]
    fn long_doubles_the_weight_and_an_explicit_none_divides_it_by_ten() {
        let factors =
            [Retention::Long, Retention::Short, Retention::Unsaid, Retention::None].map(Retention::weight_factor);
        assert_eq!(factors, [2.0, 1.0, 1.0, 0.1]);
    }

    #[test]
    fn the_strongest_hint_counts() {
        let check = |member, has_key, mark, expected| {
            let found = Found { member, has_key, marks: [Retention::Unsaid, mark, Retention::Unsaid] };
            assert_eq!(found.retention(), expected, "{found:?}");
        };
        check(None, false, Retention::Unsaid, Retention::Unsaid);
        check(None, true, Retention::Unsaid, Retention::Short);
        check(Some(None), true, Retention::Unsaid, Retention::Unsaid);
        check(Some(Some(Retention::None)), true, Retention::Unsaid, Retention::None);
        check(Some(Some(Retention::None)), false, Retention::Short, Retention::Short);
        check(Some(Some(Retention::Short)), false, Retention::Long, Retention::Long);
    }
}
