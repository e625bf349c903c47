//! `put` and `put-in-tube`: from the line to the job, whose body may arrive much later.

use crate::engine::conn::{Conn, Doing};
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::protocol::parse::{Args, Tags};
use crate::engine::protocol::reply::{Answer, Reply, Word};
use crate::engine::queue::body::{Body, LARGE};
use crate::engine::queue::job::JobParams;
use crate::engine::queue::unique::NewKey;
use crate::engine::store::Store;
use crate::engine::text::{self, CR_LF};

/// A put whose body is arriving.
#[derive(Debug)]
pub struct Put {
    /// The id of the new job.
    pub id: u64,
    params: JobParams,
    /// The length of the body with CR LF, in bytes.
    pub full_len: u32,
    /// What few puts have, so that an idle connection takes less memory.
    extras: Option<Box<[Extras; 1]>>,
}

#[derive(Debug)]
struct Extras {
    /// The tube of a `put-in-tube`, or `None` for the tube that the connection uses.
    tube: Option<Box<str>>,
    /// The keys of the job.
    unique: Option<NewKey>,
}

/// A put whose body is at least [`LARGE`] bytes long and is arriving.
#[derive(Debug)]
pub struct LargePut {
    pub put: Put,
    /// The slot of the body.
    pub body: Body,
    /// The number of bytes that have arrived.
    pub filled: usize,
}

impl Put {
    fn tube(&self) -> Option<&str> {
        self.extras.as_ref()?[0].tube.as_deref()
    }

    fn unique(&self) -> Option<&NewKey> {
        self.extras.as_ref()?[0].unique.as_ref()
    }
}

/// `put <pri> <delay> <ttr> <bytes> [idp:<key>[:<ttl>]] [con:<key>[:<limit>]]`
pub fn put(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    begin(c, s, args, None)
}

/// `put-in-tube <tube> <pri> <delay> <ttr> <bytes> [idp:<key>[:<ttl>]] [con:<key>[:<limit>]]`
pub fn put_in_tube(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    begin(c, s, args, Some(args.tube))
}

#[inline]
fn begin(c: &mut Conn, s: &mut Store, args: &Args<'_>, tube: Option<&str>) -> Answer {
    let params =
        JobParams { pri: args.number(0), delay_secs: args.number(1), ttr_secs: args.number(2) };
    let (body_len, full_len) = (args.number(3), args.number(3) as usize + CR_LF.len());
    if body_len > s.queue.settings.max_job_size {
        return skip_body(c, full_len, Word::JOB_TOO_BIG);
    }
    let tags = if args.rest.is_empty() {
        None
    } else {
        // Quirk: the body is read as commands; pinned by tests/conversations/put-bad-format.txt.
        Some(args.rest.tags().ok_or(Word::BAD_FORMAT)?)
    };
    s.queue.mark_producer(&mut c.client);
    // If a job has the same key at the end of the body, a small body needs no memory.
    let needs_memory = tags.is_none_or(|tags| tags.unique.is_none()) || full_len >= LARGE;
    // In drain mode the reply to a put is `DRAINING`, at the end of the body.
    let has_memory = s.is_draining
        || !needs_memory
        || (s.has_memory_for(full_len, tags.is_some()) && s.has_headroom(Headroom::Whole));
    let has_extras = tube.is_some() || tags.is_some();
    let extras = has_extras.then(|| try_extras(c, s, tube, tags)).transpose();
    let (true, Ok(extras)) = (has_memory, extras) else {
        return skip_body(c, full_len, no_memory(s));
    };
    s.queue.last_id += 1;
    let full_len = u32::try_from(full_len).expect("a body of more than 2^30 bytes");
    c.sends_large_bodies = full_len as usize >= Conn::WORTH_TWO_READS;
    c.then(Doing::Body(Put { id: s.queue.last_id, params, full_len, extras }))
}

#[cold]
fn try_extras(
    c: &Conn,
    s: &Store,
    tube: Option<&str>,
    tags: Option<Tags<'_>>,
) -> Result<Box<[Extras; 1]>, NoMemory> {
    let name = tube.unwrap_or(&s.queue.tubes[c.client.used].name);
    let new_key =
        |tags: Tags<'_>| s.queue.unique.new_key(name, tags.unique, tags.con, s.queue.last_id + 1);
    let unique = tags.map(new_key);
    let tube = tube.map(text::try_boxed).transpose()?;
    headroom::try_box(Headroom::Quarter, Extras { tube, unique })
}

fn skip_body(c: &mut Conn, full_len: usize, word: Word) -> Answer {
    c.then(Doing::SkipBody(full_len, word))
}

/// Returns the reply to a put for which there is no memory. The server may refuse the job anyway.
fn no_memory(s: &Store) -> Word {
    if s.is_draining { Word::DRAINING } else { Word::OUT_OF_MEMORY }
}

/// Allocates the slot of a large body that is about to arrive.
pub fn begin_body(c: &mut Conn, s: &mut Store, put: Put) -> Answer {
    let full_len = put.full_len as usize;
    if s.has_memory_for(full_len, put.unique().is_some())
        && let Ok(body) = headroom::keeping(Headroom::Whole, || s.queue.bodies.begin(full_len))
    {
        return c.then(Doing::LargeBody(Box::new(LargePut { put, body, filled: 0 })));
    }
    skip_body(c, full_len, no_memory(s))
}

/// Continues with a large body of which `count` more bytes have arrived.
pub fn advance(c: &mut Conn, s: &mut Store, mut large: Box<LargePut>, count: usize) -> Answer {
    large.filled += count;
    s.queue.bodies.free_behind(count);
    if large.filled < large.put.full_len as usize {
        return c.then(Doing::LargeBody(large));
    }
    let LargePut { put, body, .. } = *large;
    let ends_in_cr_lf = s.queue.bodies.bytes(&body).ends_with(CR_LF);
    match answer_without_job(s, &put, ends_in_cr_lf) {
        Some(answer) => {
            s.queue.drop_body(body);
            answer
        }
        None => insert(c, s, &put, body),
    }
}

/// Puts a job whose small body has arrived.
pub fn finish_small(c: &Conn, s: &mut Store, put: &Put, bytes: &[u8]) -> Answer {
    if let Some(answer) = answer_without_job(s, put, bytes.ends_with(CR_LF)) {
        return answer;
    }
    // Other clients may have put jobs while this body arrived.
    if !s.has_memory_for(bytes.len(), put.unique().is_some()) || !s.has_headroom(Headroom::Half) {
        return Err(Word::OUT_OF_MEMORY);
    }
    let body = headroom::keeping(Headroom::Whole, || s.queue.bodies.add(bytes))?;
    insert(c, s, put, body)
}

/// Returns the answer to a put that inserts no job, although there is memory for it.
fn answer_without_job(s: &mut Store, put: &Put, ends_in_cr_lf: bool) -> Option<Answer> {
    if !ends_in_cr_lf {
        return Some(Err(Word::EXPECTED_CRLF));
    }
    if s.is_draining {
        return Some(Err(Word::DRAINING));
    }
    hit(s, put.unique()?)
}

/// Returns the answer to a put whose key is in force.
#[cold]
fn hit(s: &mut Store, unique: &NewKey) -> Option<Answer> {
    let hit = s.queue.find_unique(unique.digest)?;
    s.queue.unique.hits += 1;
    Some(Ok(Reply::InsertedBefore(hit)))
}

fn insert(c: &Conn, s: &mut Store, put: &Put, body: Body) -> Answer {
    let queue = &mut s.queue;
    let found = match put.tube() {
        None => Ok(c.client.used),
        Some(name) => headroom::keeping(Headroom::Whole, || queue.find_or_create_tube(name)),
    };
    match found {
        Ok(tube) => queue.put(tube, put.id, put.params, put.unique(), body)?,
        Err(no_memory) => {
            queue.drop_body(body);
            return Err(no_memory.into());
        }
    }
    Ok(Reply::Number("INSERTED ", put.id))
}
