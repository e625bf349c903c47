//! Selects the media type of the status page by the `Accept` fields of a request (RFC 9110, section
//! 12.5.1).

/// The media types of the status page. Of types with equal quality the first is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MediaType {
    #[default]
    Html,
    Text,
    Json,
}

/// The specificity of a media range. The most specific range that matches a type determines its
/// quality.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Specificity {
    /// `*/*`
    Anything,
    /// `text/*`
    Class,
    /// `text/html`
    Exact,
}

impl MediaType {
    const ALL: [MediaType; 3] = [MediaType::Html, MediaType::Text, MediaType::Json];

    /// Returns the value of the field `Content-Type`.
    pub fn name(self) -> &'static str {
        match self {
            MediaType::Html => "text/html; charset=utf-8",
            MediaType::Text => "text/plain; charset=utf-8",
            MediaType::Json => "application/json",
        }
    }

    /// Returns the type and the subtype without parameters.
    fn range(self) -> (&'static str, &'static str) {
        match self {
            MediaType::Html => ("text", "html"),
            MediaType::Text => ("text", "plain"),
            MediaType::Json => ("application", "json"),
        }
    }

    /// Returns the type that a client with these `Accept` fields prefers. If it accepts none of
    /// them, it gets HTML: section 12.5.1 allows a response that ignores the field.
    pub fn preferred<'h>(fields: impl Iterator<Item = &'h [u8]> + Clone) -> MediaType {
        let mut preferred = (0, MediaType::default());
        for media_type in MediaType::ALL {
            let quality = media_type.quality(fields.clone());
            if quality > preferred.0 {
                preferred = (quality, media_type);
            }
        }
        preferred.1
    }

    /// Returns the quality of this type in thousandths.
    fn quality<'h>(self, fields: impl Iterator<Item = &'h [u8]>) -> u16 {
        let ranges = fields.filter_map(|field| std::str::from_utf8(field).ok());
        let ranges = ranges.flat_map(|field| field.split(','));
        let matching = ranges.filter_map(|range| self.matched_by(range));
        matching.max_by_key(|&(specificity, _)| specificity).map_or(0, |(_, quality)| quality)
    }

    /// Returns the specificity and the quality of a media range that matches this type.
    fn matched_by(self, range: &str) -> Option<(Specificity, u16)> {
        let mut parts = range.split(';').map(str::trim);
        let (class, subtype) = parts.next()?.split_once('/')?;
        let (own_class, own_subtype) = self.range();
        let specificity = match (class, subtype) {
            ("*", "*") => Specificity::Anything,
            (class, "*") if class.eq_ignore_ascii_case(own_class) => Specificity::Class,
            (class, subtype)
                if class.eq_ignore_ascii_case(own_class)
                    && subtype.eq_ignore_ascii_case(own_subtype) =>
            {
                Specificity::Exact
            }
            _ => return None,
        };
        let quality = parts.find_map(|part| part.strip_prefix(['q', 'Q'])?.strip_prefix('='));
        Some((specificity, quality.map_or(1_000, thousandths)))
    }
}

/// Parses a quality such as `0.25`. An invalid one counts as 0.
fn thousandths(quality: &str) -> u16 {
    let (whole, decimals) = quality.split_once('.').unwrap_or((quality, ""));
    let is_number = decimals.len() <= 3 && decimals.bytes().all(|byte| byte.is_ascii_digit());
    match (whole, is_number) {
        ("1", true) => 1_000,
        ("0", true) => format!("{decimals:0<3}").parse().unwrap_or(0),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_preferred_type_is_sent() {
        let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8";
        for (accept, expected) in [
            (&[][..], MediaType::Html),
            (&["*/*"], MediaType::Html),
            (&[browser], MediaType::Html),
            (&["text/*"], MediaType::Html),
            (&["text/plain"], MediaType::Text),
            (&["Text/Plain;charset=utf-8"], MediaType::Text),
            (&["application/json"], MediaType::Json),
            (&["application/*, text/plain;q=0.5"], MediaType::Json),
            (&["text/html;q=0.5, text/plain ; q=0.75"], MediaType::Text),
            (&["text/html;q=0.5", "application/json;q=0.6"], MediaType::Json),
            (&["text/html;q=0, */*;q=0.1"], MediaType::Text),
            (&["*/*;q=0.9, text/html;q=0.1"], MediaType::Text),
            (&["text/plain;q=2, text/html;q=0.001"], MediaType::Html),
            (&["text/plain;q=0.1234, application/json;q=0.1"], MediaType::Json),
            (&["image/png"], MediaType::Html),
            (&["text/plain;q=0"], MediaType::Html),
            (&["text"], MediaType::Html),
            (&[",;/,"], MediaType::Html),
        ] {
            let fields = accept.iter().map(|field| field.as_bytes());
            assert_eq!(MediaType::preferred(fields), expected, "{accept:?}");
        }
        let invalid: [&[u8]; 2] = [b"\xff", b"text/plain"];
        assert_eq!(MediaType::preferred(invalid.into_iter()), MediaType::Text);
    }
}
