//! `failed`, `jobs`, `job` and `workers`: lists that change nothing.

use super::conn::{Conn, Fields};
use super::look::{self, Pages};
use super::print::{Listing, NAME_LEN, cut, escaped};
use super::{Ctl, EXIT_PARTLY, Flags, Result, args, complain, print, print_with};
use crate::engine::text::{CountOf, Span};
use crate::os::failure::Failure;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{self, IsTerminal};

/// The largest body of which a list shows the beginning, and the bytes that it shows.
const PREVIEW_MAX: u64 = 65_536;
const PREVIEW_LEN: usize = 80;

/// `failed`
pub fn failed(ctl: &mut Ctl, args: &Flags) -> Result {
    let mut left = args.number("limit")?.unwrap_or(u64::MAX);
    let tubes = match args.words.first() {
        Some(name) => vec![look::tube(&mut ctl.conn, name)?],
        None => look::all_tubes(&mut ctl.conn)?,
    };
    const COLUMNS: &str = "id>ID tube~TUBE age:AGE reserves>RESERVES timeouts>TIMEOUTS \
                           buries>BURIES bytes>BYTES body.BODY";
    let mut listing = Listing::new(ctl.is_json, COLUMNS);
    let mut is_cut = false;
    for tube in tubes.iter().filter(|tube| tube.jobs("buried") > 0) {
        let pages = Pages { tube: &tube.name, state: "buried", after: 0, left };
        let shown = show(ctl, pages, &mut listing)?;
        left -= shown;
        is_cut |= shown < tube.jobs("buried");
    }
    listing.print()?;
    if is_cut && !ctl.conn.has_more()? {
        complain("this server has no list-jobs: only the first buried job of a tube is shown");
    }
    Ok(())
}

/// `jobs`
pub fn jobs(ctl: &mut Ctl, args: &Flags) -> Result {
    let state = args.state()?.unwrap_or("any");
    let after = args.number("after")?.unwrap_or(0);
    let left = args.number("limit")?.unwrap_or(u64::MAX);
    let tube = look::tube(&mut ctl.conn, &args.words[0])?;
    ctl.conn.must_have("list-jobs")?;
    let own = if state == "reserved" { "client>CLIENT held:HELD" } else { "reserves>RESERVES" };
    let columns = format!(
        "id>ID state<STATE pri>PRI age:AGE ttr:TTR time-left:LEFT {own} bytes>BYTES body.BODY"
    );
    let mut listing = Listing::new(ctl.is_json, &columns);
    show(ctl, Pages { tube: &tube.name, state, after, left }, &mut listing)?;
    listing.print()
}

/// Adds jobs to a listing, in a table with the beginnings of their bodies. Returns their number.
fn show(ctl: &mut Ctl, mut pages: Pages<'_>, listing: &mut Listing) -> Result<u64> {
    let mut count = 0;
    while let jobs @ [_, ..] = &pages.next(&mut ctl.conn)?[..] {
        count += jobs.len() as u64;
        let has_preview = |job: &&Fields| !ctl.is_json && job.number("bytes") <= PREVIEW_MAX;
        let small: Vec<&Fields> = jobs.iter().filter(has_preview).collect();
        let replies = ctl.conn.ask_each(&small, |job| format!("peek {}", job.text("id")))?;
        let mut replies = replies.into_iter();
        for job in jobs {
            let reply = if has_preview(&job) { replies.next() } else { None };
            let body = reply.map_or(Ok(None), |reply| reply.content("peek"))?.unwrap_or_default();
            let body = escaped(&body[..body.len().min(PREVIEW_LEN)]);
            listing.add(job, &[("body", body)])?;
        }
    }
    Ok(count)
}

/// `job`
pub fn job(ctl: &mut Ctl, args: &Flags) -> Result {
    let id = args::id(&args.words[0])?;
    let conn = &mut ctl.conn;
    let gone = || Failure::new(EXIT_PARTLY, format!("job {id}: not found"));
    let mut job = look::jobs(conn, &[id])?.pop().flatten().ok_or_else(gone)?;
    let body = conn.ask(&format!("peek {id}"))?.content("peek")?.ok_or_else(gone)?;
    // The list also has the holder, and the number of bytes.
    let tube = job.text("tube").to_owned();
    let mut list = Pages { tube: &tube, state: "any", after: id - 1, left: 1 };
    let listed = list.next(conn).unwrap_or_default().pop();
    match listed.filter(|listed| listed.number("id") == id) {
        Some(listed) => job = listed,
        None => job.push("bytes", body.len()),
    }
    if ctl.is_json {
        job.push_body(&body);
        print(job)
    } else if !args.has("body") {
        let keys = job.0.iter().map(|(key, _)| key).filter(|key| *key != "tube");
        let lines: String = keys.map(|key| format!("{key}: {}\n", job.text(key))).collect();
        print(format_args!("tube: {tube}\n{lines}body: {}", escaped(&body)))
    } else if io::stdout().is_terminal() {
        print(escaped(&body))
    } else {
        print_with(|out| out.write_all(&body))
    }
}

/// `workers`
pub fn workers(ctl: &mut Ctl, args: &Flags) -> Result {
    let tube = args.words.first().map(|name| args::tube(name)).transpose()?;
    let of_tube = tube.map_or(String::new(), |tube| format!(" {tube}"));
    let conn = &mut ctl.conn;
    let mut clients: Vec<Fields> = Vec::new();
    loop {
        let after = clients.last().map_or(0, |client| client.number("id"));
        let page = conn.ask(&format!("list-clients 1000 {after}{of_tube}"))?;
        let gone = || Failure::new(EXIT_PARTLY, format!("tube{of_tube}: not found"));
        let page = page.entries("list-clients")?.ok_or_else(gone)?;
        if page.is_empty() {
            break;
        }
        clients.extend(page);
    }
    // The tool itself, which watches only the tube `default`, is left out. Over a Unix socket it has no address of its
    // own: it is the youngest client that has just sent a command.
    let is_own = |client: &&Fields| {
        client.text("address") == conn.own_address && client.text("activity") == "receiving"
    };
    let is_listed = tube.is_none_or(|tube| tube == "default");
    let own = clients.iter().filter(is_own).filter(|_| is_listed);
    let own = own.min_by_key(|client| client.number("age")).map(|client| client.number("id"));
    clients.retain(|client| Some(client.number("id")) != own);
    if let Some(tube) = tube.filter(|_| clients.is_empty()) {
        complain(format_args!("no client watches tube {tube}; 'workers' shows all clients"));
    }
    let mut holds = held_jobs(conn)?;
    clients.sort_by_cached_key(|client| {
        let jobs = holds.get(&client.number("id"));
        Reverse(jobs.map(|jobs| jobs[0].number("held")))
    });
    const COLUMNS: &str = "id>CLIENT address~ADDRESS age:AGE activity<ACTIVITY watching>WATCHING \
                           using~USING jobs.HOLDS";
    let mut listing = Listing::new(ctl.is_json, COLUMNS);
    for mut client in clients {
        let jobs = holds.remove(&client.number("id")).unwrap_or_default();
        let hold = |job: &Fields| {
            let tube = cut(job.text("tube"), NAME_LEN, true);
            format!("{}: job {} of {tube}", Span(job.number("held")), job.text("id"))
        };
        let [objects, mut texts] = [Fields::to_string, hold as fn(&Fields) -> String]
            .map(|text| jobs.iter().map(text).collect::<Vec<_>>().join(", "));
        if jobs.len() > 1 {
            texts = format!("{}: {texts}", CountOf(jobs.len() as u64, "job"));
        }
        client.push("jobs", format_args!("[{objects}]"));
        listing.add(&client, &[("jobs", texts)])?;
    }
    listing.print()
}

/// Returns the jobs that clients hold, the longest held first, by the number of the client.
fn held_jobs(conn: &mut Conn) -> Result<HashMap<u64, Vec<Fields>>> {
    let mut holds: HashMap<u64, Vec<Fields>> = HashMap::new();
    for tube in look::all_tubes(conn)? {
        let left = tube.jobs("reserved");
        let mut pages = Pages { tube: &tube.name, state: "reserved", after: 0, left };
        while let jobs @ [_, ..] = &pages.next(conn)?[..] {
            for job in jobs {
                holds.entry(job.number("client")).or_default().push(job.clone());
            }
        }
    }
    holds.values_mut().for_each(|jobs| jobs.sort_by_key(|job| Reverse(job.number("held"))));
    Ok(holds)
}
