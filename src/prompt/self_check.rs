//! Texts on which a fast encoder must agree with the reference before it is trusted with a model.
//!
//! Deterministic: the same model is judged alike at every start.

use serde_json::Value;

/// Hard for pre-tokenizers and normalisers: contractions, numbers, runs of space, scripts, composed and decomposed
/// letters, joiners, controls.
const HARD: [&str; 36] = [
    "",
    " ",
    "  ",
    "a",
    " a",
    "a ",
    "\n",
    "\n\n",
    "\r\n",
    "\t\t x",
    "I'M we'Ve you'll THEY'RE it's 'tis o'clock",
    "ſ's İ'S",
    "1234567890 3.14159 1,234.56 0xDEADBEEF ½ ² ٣ १२३",
    "a     b\n\n\n   \n\tc\t\t\td",
    "x\u{a0}y\u{200b}z\u{2028}w\u{85}v\u{b}u\u{1f}",
    "café cafe\u{301} Å A\u{30a} \u{212b} ﬁ ﷺ Ⅷ ①",
    "\u{1e9b}\u{323}\u{301}\u{301}",
    "你是一个有帮助的助手。日本語とハングル 한국어도",
    "مرحبا بالعالم! שלום नमस्ते สวัสดีชาวโลก வணக்கம்",
    "👩‍👩‍👧‍👦🏳️‍🌈 👍🏽 🇳🇴 😀😃 ❤️‍🔥",
    "<a href=\"x?y=1&z=2\">'q' & \"d\"</a>",
    "fn f<'a, T: Tr>(x: &'a mut [T]) -> Result<u64, E> { x.iter().map(|v| v.g()).sum() }",
    "{\"k\": [1, 2.5, null], \"ü\": \"\\u00e9\"}",
    "def __init__(self, *args, **kwargs):\n    return [x ** 2 for x in range(10)]  # done\n",
    "https://example.org/a_b?c=d#e-f",
    "snake_case camelCase SCREAMING_CASE kebab-case",
    "...!!!???;;;:::---===___***///",
    "\u{0}\u{1}\u{7f}\u{fffd}\u{feff}",
    "\u{10ffff}\u{e000}\u{1f9d1}\u{fe0f}\u{20e3}",
    "ΑΣ ΟΔΟΣ ǅ ß ẞ",
    "a\u{300}\u{301}\u{302}\u{303}",
    " \u{3000}\u{2003} wide ",
    "e\u{301}e\u{301}e\u{301}",
    "\u{1100}\u{1161}\u{11a8}가각",
    "Straße12abc34",
    "'s's''s 'S",
];

/// Rounds of texts put together at random.
const RANDOM_TEXTS: usize = 200;

/// Added tokens that are mixed in.
const ADDED_TOKENS_MAX: usize = 64;

/// The texts for a model, given its parsed tokenizer.json.
pub fn texts(tokenizer: &Value) -> Vec<String> {
    let contents = tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    let added: Vec<&str> = contents
        .filter_map(|token| token.get("content").and_then(Value::as_str))
        .filter(|content| !content.is_empty())
        .take(ADDED_TOKENS_MAX)
        .collect();
    let mut texts: Vec<String> = HARD.iter().map(|text| (*text).to_owned()).collect();
    texts.extend(added.iter().map(|content| format!("x {content} y{content}{content}\n")));
    texts.extend(["_", "a", " ", "\n", "😀", "ab1"].iter().map(|part| part.repeat(3000)));
    texts.push(HARD.join(" ").repeat(20));
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    for _ in 0..RANDOM_TEXTS {
        let mut text = String::new();
        for _ in 0..=draw(12) {
            match draw(10) {
                0..=4 => {
                    let part: Vec<char> = HARD[draw(HARD.len())].chars().collect();
                    let (from, to) = (draw(part.len() + 1), draw(part.len() + 1));
                    text.extend(&part[from.min(to)..from.max(to)]);
                }
                5..=6 if !added.is_empty() => text.push_str(added[draw(added.len())]),
                7 => text.extend(char::from_u32(draw(0x3000) as u32)),
                8 => text.extend(char::from_u32(draw(0x20000) as u32)),
                _ => text.push_str([" ", "\n", "  ", "the", "The", "'s", "42", "."][draw(8)]),
            }
        }
        texts.push(text);
    }
    texts
}
