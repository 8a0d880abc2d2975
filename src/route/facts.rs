//! What a body says of its images and of the caching it wants, collected while its outline is read.
//! Text is skipped, an image's reference is hashed where it lies, and nothing is ever refused.
//!
//! Shapes: OpenAI content parts, OpenAI Responses input items, Anthropic blocks (nested in tool results too),
//! a top-level `images` list, a top-level `audio`.

use std::borrow::Cow;

use super::hints::{Found, Retention};
use super::images::ImageKey;
use crate::limits::IMAGES_PER_REQUEST_MAX;
use crate::prompt::json::{JsonResult, Values};

/// What routing makes of a body beyond its text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BodyFacts {
    /// Image, audio, video or file parts: the text's blocks say nothing about them.
    pub is_multimodal: bool,
    /// Keys of what the request refers to, in the order messages, system, images; repetitions included.
    pub images: Vec<ImageKey>,
    pub retention: Retention,
    /// Entries of `messages` and `input`, and the parts that an entry has beyond its first: about what a template goes through.
    pub messages: usize,
}

/// Collects the facts while a body is read.
#[derive(Default)]
pub struct FactsScan {
    messages: Media,
    input: Media,
    system: Media,
    images: Media,
    has_audio: bool,
    hints: Found,
}

/// One source of media; a repeated member replaces its earlier value.
#[derive(Default)]
struct Media {
    is_there: bool,
    keys: Vec<ImageKey>,
    /// Objects in the list.
    entries: usize,
}

const SYSTEM: usize = 0;
const TOOLS: usize = 1;
const MESSAGES: usize = 2;

impl FactsScan {
    /// Reads the top-level member `key`, whose value the reader is at, and consumes it.
    pub fn member<'a>(&mut self, reader: &mut impl Values<'a>, key: &str) -> JsonResult<()> {
        match key {
            "messages" => (self.messages, self.hints.marks[MESSAGES]) = parts(reader)?,
            "input" => (self.input, _) = parts(reader)?,
            "system" => (self.system, self.hints.marks[SYSTEM]) = parts(reader)?,
            // Schemas of tools may well have members called `image`; only their marks are read.
            "tools" => (_, self.hints.marks[TOOLS]) = parts(reader)?,
            "images" => self.images = references(reader)?,
            "audio" => self.has_audio = holds_something(reader)?,
            "prompt_cache_retention" => {
                self.hints.member = string(reader)?.map(|value| Retention::of_member(&value));
            }
            "prompt_cache_key" => {
                self.hints.has_key = reader.peek() != Some(b'n');
                reader.skip()?;
            }
            _ => reader.skip()?,
        }
        Ok(())
    }

    /// What the members read so far say.
    pub fn facts(self) -> BodyFacts {
        let messages = self.messages.entries + self.input.entries;
        let sources = [self.messages, self.input, self.system, self.images];
        let is_multimodal = self.has_audio || sources.iter().any(|source| source.is_there);
        let images = sources.into_iter().flat_map(|source| source.keys).take(IMAGES_PER_REQUEST_MAX).collect();
        BodyFacts { is_multimodal, images, retention: self.hints.retention(), messages }
    }
}

/// A list of messages, input items or parts, or one value of any other kind. Gives the media in it, those
/// inside a `content` included, and its strongest mark.
fn parts<'a>(reader: &mut impl Values<'a>) -> JsonResult<(Media, Retention)> {
    let (mut media, mut mark) = (Media::default(), Retention::Unsaid);
    if reader.peek() == Some(b'[') {
        reader.array(|reader| {
            if reader.peek() != Some(b'{') {
                return reader.skip();
            }
            media.entries += 1;
            let mut part = Part::default();
            reader.object(|reader, key| part.member(reader, &key))?;
            part.add_to(&mut media, &mut mark);
            Ok(())
        })?;
    } else {
        reader.skip()?;
    }
    Ok((media, mark))
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Kind {
    #[default]
    Other,
    Media,
    /// Reasoning blocks carry no usable mark.
    Thinking,
}

/// One object of a list as it is read; its type may come last.
#[derive(Default)]
struct Part {
    kind: Kind,
    /// A member that only media have.
    has_media_member: bool,
    /// The best reference so far and its rank: of several, the one that names the content best.
    reference: Option<(u8, ImageKey)>,
    mark: Retention,
    /// Parts inside: a message's content, a tool's result.
    inside: Media,
    mark_inside: Retention,
}

impl Part {
    fn member<'a>(&mut self, reader: &mut impl Values<'a>, key: &str) -> JsonResult<()> {
        match key {
            "type" => {
                self.kind = match string(reader)?.as_deref() {
                    Some(
                        "image" | "image_url" | "input_image" | "image_pil" | "input_audio" | "audio" | "audio_url"
                        | "video" | "video_url" | "input_video" | "document" | "file" | "input_file",
                    ) => Kind::Media,
                    Some("thinking" | "redacted_thinking") => Kind::Thinking,
                    _ => Kind::Other,
                };
            }
            "image_url" | "video_url" | "audio_url" | "input_image" => self.media_member(reader, 0)?,
            "input_audio" => self.media_member(reader, 1)?,
            "source" => self.refer(reader, 2)?,
            "url" => self.refer(reader, 4)?,
            "data" => self.refer(reader, 5)?,
            "file" | "file_data" | "file_url" | "file_id" | "image" | "video" | "audio" => self.refer(reader, 6)?,
            "content" => (self.inside, self.mark_inside) = parts(reader)?,
            "cache_control" => self.mark = mark(reader)?,
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn media_member<'a>(&mut self, reader: &mut impl Values<'a>, rank: u8) -> JsonResult<()> {
        self.has_media_member |= reader.peek() != Some(b'n');
        self.refer(reader, rank)
    }

    fn refer<'a>(&mut self, reader: &mut impl Values<'a>, rank: u8) -> JsonResult<()> {
        if let Some(key) = reference(reader)?
            && self.reference.is_none_or(|(best, _)| rank < best)
        {
            self.reference = Some((rank, key));
        }
        Ok(())
    }

    fn add_to(self, media: &mut Media, strongest: &mut Retention) {
        if self.kind == Kind::Media || self.has_media_member {
            media.is_there = true;
            media.keys.extend(self.reference.map(|(_, key)| key));
        }
        media.entries += self.inside.entries.saturating_sub(1);
        media.is_there |= self.inside.is_there;
        media.keys.extend(self.inside.keys);
        media.keys.truncate(IMAGES_PER_REQUEST_MAX);
        let own = if self.kind == Kind::Thinking { Retention::Unsaid } else { self.mark };
        *strongest = (*strongest).max(own).max(self.mark_inside);
    }
}

/// The key of a reference: the string itself, or the member of an object that names the content best.
fn reference<'a>(reader: &mut impl Values<'a>) -> JsonResult<Option<ImageKey>> {
    match reader.peek() {
        Some(b'"') => Ok(ImageKey::of_reference(&reader.string()?)),
        Some(b'{') => {
            let mut best: Option<(u8, ImageKey)> = None;
            reader.object(|reader, key| {
                let rank = match &*key {
                    "url" => 0,
                    "data" => 1,
                    "file_data" => 2,
                    "file_url" => 3,
                    "file_id" => 4,
                    _ => return reader.skip(),
                };
                if let Some(text) = string(reader)?
                    && let Some(key) = ImageKey::of_reference(&text)
                    && best.is_none_or(|(held, _)| rank < held)
                {
                    best = Some((rank, key));
                }
                Ok(())
            })?;
            Ok(best.map(|(_, key)| key))
        }
        _ => reader.skip().map(|()| None),
    }
}

/// A top-level list of images: strings, or objects as in a part.
fn references<'a>(reader: &mut impl Values<'a>) -> JsonResult<Media> {
    let mut media = Media::default();
    if reader.peek() != Some(b'[') {
        reader.skip()?;
        return Ok(media);
    }
    reader.array(|reader| {
        media.is_there = true;
        let key = if reader.peek() == Some(b'{') {
            let mut part = Part::default();
            reader.object(|reader, key| part.member(reader, &key))?;
            part.reference.map(|(_, key)| key)
        } else {
            reference(reader)?
        };
        if media.keys.len() < IMAGES_PER_REQUEST_MAX {
            media.keys.extend(key);
        }
        Ok(())
    })?;
    Ok(media)
}

fn mark<'a>(reader: &mut impl Values<'a>) -> JsonResult<Retention> {
    if reader.peek() != Some(b'{') {
        reader.skip()?;
        return Ok(Retention::Unsaid);
    }
    let (mut kind, mut ttl) = (None, None);
    let mut odd_ttl = false;
    reader.object(|reader, key| {
        match &*key {
            "type" => kind = string(reader)?,
            "ttl" => {
                odd_ttl = !matches!(reader.peek(), Some(b'"' | b'n'));
                ttl = string(reader)?;
            }
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    if odd_ttl {
        return Ok(Retention::Unsaid);
    }
    Ok(Retention::of_mark(kind.as_deref(), ttl.as_deref()).unwrap_or_default())
}

/// The value where it is a string.
fn string<'a>(reader: &mut impl Values<'a>) -> JsonResult<Option<Cow<'a, str>>> {
    if reader.peek() == Some(b'"') { reader.string().map(Some) } else { reader.skip().map(|()| None) }
}

/// An object, or a list that is not empty.
fn holds_something<'a>(reader: &mut impl Values<'a>) -> JsonResult<bool> {
    match reader.peek() {
        Some(b'{') => reader.skip().map(|()| true),
        Some(b'[') => {
            let mut any = false;
            reader.array(|reader| {
                any = true;
                reader.skip()
            })?;
            Ok(any)
        }
        _ => reader.skip().map(|()| false),
    }
}

#[cfg(test)]
#[path = "facts_tests.rs"]
mod tests;
