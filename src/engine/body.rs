//! The bytes of a job, as clients sent them: opaque, and never changed once complete.
//!
//! A body is kept together with the CR LF that ends it on the wire, so that a reply is a
//! header and then exactly these bytes. Small bodies are one allocation and are copied
//! into replies; a large one is shared with the replies that carry it, so that deleting
//! the job while a slow client still receives it is harmless.

use std::collections::TryReserveError;
use std::rc::Rc;

/// From this length on, sharing a body costs less than copying it into a reply.
const SHARED_FROM: usize = 4096;

/// The bytes of a complete job, with their CR LF.
#[derive(Debug)]
pub enum Body {
    /// Copied into replies.
    Small(Box<[u8]>),
    /// Shared with replies.
    Large(Rc<Vec<u8>>),
}

/// A body that is still arriving.
#[derive(Debug)]
pub struct Upload {
    bytes: Vec<u8>,
    /// How many bytes there will be, with CR LF.
    expected: usize,
}

impl Body {
    /// The bytes, with CR LF.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Body::Small(bytes) => bytes,
            Body::Large(bytes) => bytes,
        }
    }

    /// The length as clients count it: without CR LF.
    pub fn len(&self) -> usize {
        self.bytes().len() - CR_LF.len()
    }

    /// Whether there is nothing before the CR LF.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Upload {
    /// Room for a body of `len` bytes and its CR LF.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_new(len: u32) -> Result<Upload, TryReserveError> {
        let expected = len as usize + CR_LF.len();
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(expected)?;
        Ok(Upload { bytes, expected })
    }

    /// Takes what belongs to the body from the front of `input`; says how many bytes.
    pub fn take(&mut self, input: &[u8]) -> usize {
        let count = input.len().min(self.expected - self.bytes.len());
        self.bytes.extend_from_slice(&input[..count]);
        count
    }

    /// Whether all bytes have arrived.
    pub fn is_complete(&self) -> bool {
        self.bytes.len() == self.expected
    }

    /// The complete body, provided that it ends in CR LF.
    pub fn finish(self) -> Option<Body> {
        if !self.bytes.ends_with(CR_LF) {
            return None;
        }
        Some(if self.bytes.len() < SHARED_FROM {
            Body::Small(self.bytes.into_boxed_slice())
        } else {
            Body::Large(Rc::new(self.bytes))
        })
    }
}

/// The end of lines and bodies.
pub const CR_LF: &[u8] = b"\r\n";
