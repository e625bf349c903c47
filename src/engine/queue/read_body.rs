//! Bodies that were read back, and the memory that they take until the last reply with them is sent.
//!
//! A reply gets a [`Grant`] before its bodies are read. Each body takes its bytes out of the grant, and
//! gives them back when it is dropped. It is shared: two replies with the same body have one copy.

use super::body::Body;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};

/// A body that was read back, in its record.
#[derive(Debug)]
pub struct ReadBody {
    record: Vec<u8>,
    /// The cold body, with the length of the bytes at the end of the record.
    pub body: Body,
    grant: Grant,
}

/// The size of a reply. Each has memory of its own, so that large replies that clients do not read keep no
/// worker from its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyClass {
    Small,
    Large,
}

impl ReplyClass {
    pub const ALL: [ReplyClass; 2] = [ReplyClass::Small, ReplyClass::Large];
}

/// Memory that a reply may take for its bodies, or that one of them takes.
#[derive(Debug)]
pub struct Grant {
    bytes: u64,
    /// The bytes of text that the reply will have.
    text_len: usize,
    class: ReplyClass,
    memory: Rc<Memory>,
}

/// The bytes of all grants by class, and freed memory that is given back to the system in steps.
#[derive(Debug, Default)]
pub struct Memory {
    granted: [Cell<u64>; 2],
    /// The bytes of text that replies will have whose bodies are being read.
    pub text_len: Cell<usize>,
    pub freed: RefCell<Vec<Vec<u8>>>,
}

/// The bodies that were read back and are in memory.
#[derive(Debug, Default)]
pub struct ReadBodies {
    pub memory: Rc<Memory>,
    /// The large ones by the ids of their jobs. Some may be gone.
    shared: HashMap<u64, Weak<ReadBody>>,
}

/// From this length on a record is freed in steps: at once would take 10 ms for 50 MB.
const FREED_IN_STEPS: usize = 1024 * 1024;
/// Entries of bodies that are gone are removed from a table that is at least this long.
const FEW: usize = 64;

impl ReadBody {
    /// Returns the bytes, with CR LF.
    pub fn bytes(&self) -> &[u8] {
        &self.record[self.record.len() - self.body.full_len() as usize..]
    }
}

impl Drop for ReadBody {
    fn drop(&mut self) {
        if self.record.len() >= FREED_IN_STEPS {
            self.grant.memory.freed.borrow_mut().push(std::mem::take(&mut self.record));
        }
    }
}

impl Grant {
    /// Takes these bytes out of the grant, or what is left of them.
    pub fn split(&mut self, bytes: u32) -> Grant {
        let bytes = self.bytes.min(bytes.into());
        self.bytes -= bytes;
        Grant { bytes, text_len: 0, class: self.class, memory: Rc::clone(&self.memory) }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.memory.granted[self.class as usize].update(|granted| granted - self.bytes);
        self.memory.text_len.update(|len| len - self.text_len);
    }
}

impl ReadBodies {
    /// Grants memory for bodies, with the text that the reply will have.
    pub fn grant(&self, bytes: u64, text_len: usize, class: ReplyClass) -> Grant {
        self.memory.granted[class as usize].update(|granted| granted + bytes);
        self.memory.text_len.update(|len| len + text_len);
        Grant { bytes, text_len, class, memory: Rc::clone(&self.memory) }
    }

    /// Returns the bytes that replies of this class may take, or take.
    pub fn granted(&self, class: ReplyClass) -> u64 {
        self.memory.granted[class as usize].get()
    }

    /// Returns the bytes that all replies may take, or take.
    pub fn all_granted(&self) -> u64 {
        ReplyClass::ALL.into_iter().map(|class| self.granted(class)).sum()
    }

    /// Returns the body of the job `id` if it is in memory.
    pub fn find(&self, id: u64) -> Option<Rc<ReadBody>> {
        self.shared.get(&id)?.upgrade()
    }

    /// Adds a body of `full_len` bytes, with CR LF, at the end of the record of the job `id`. The grant is that
    /// of the reply for which it was read.
    pub fn add(
        &mut self,
        id: u64,
        record: Vec<u8>,
        full_len: u32,
        grant: &mut Grant,
    ) -> Rc<ReadBody> {
        let (body, grant) = (Body::cold(full_len), grant.split(full_len));
        let is_large = body.is_large();
        let body = Rc::new(ReadBody { record, body, grant });
        if is_large {
            if self.shared.len() == self.shared.capacity().max(FEW) {
                self.shared.retain(|_, body| body.strong_count() > 0);
            }
            // Without memory for the entry it is not shared.
            if self.shared.try_reserve(1).is_ok() {
                self.shared.insert(id, Rc::downgrade(&body));
            }
        }
        body
    }
}
