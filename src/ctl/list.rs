//! `failed`, `jobs`, `job` and `workers`: lists that change nothing.

use super::conn::{Conn, Fields};
use super::look::{self, Pages};
use super::print::{
    Cell, Listing, escaped, json_object, json_string, json_value, span, terminal_size,
};
use super::{Args, Ctl, EXIT_PARTLY, args, complain, print, print_with};
use crate::engine::text::Base64;
use crate::os::failure::Failure;
use std::cmp::Reverse;
use std::collections::HashMap;

/// The largest body of which a list shows the beginning, and the bytes that it shows.
const PREVIEW_MAX: u64 = 65_536;
const PREVIEW_LEN: usize = 80;

/// `failed`
pub fn failed(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let mut left = args.number("limit")?.unwrap_or(u64::MAX);
    let mut conn = ctl.connect()?;
    let tubes = match args.words.first() {
        Some(name) => vec![look::tube(&mut conn, name)?],
        None => {
            let names = look::tube_names(&mut conn)?;
            look::tubes(&mut conn, &names)?
        }
    };
    const COLUMNS: &str = "id>ID tube~TUBE age>AGE reserves>RESERVES timeouts>TIMEOUTS \
                           buries>BURIES bytes>BYTES body.BODY";
    let mut listing = Listing::new(false, COLUMNS);
    let mut is_cut = false;
    for tube in tubes.iter().filter(|tube| tube.jobs("buried") > 0) {
        let mut pages = Pages::new(&tube.name, "buried", 0, left, true);
        let shown = show(ctl, &mut conn, &tube.name, &mut pages, &mut listing)?;
        left -= shown;
        is_cut |= pages.peeks && shown < tube.jobs("buried");
    }
    listing.print()?;
    if is_cut {
        complain("this server has no list-jobs: only the first buried job of a tube is shown");
    }
    Ok(0)
}

/// `jobs`
pub fn jobs(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let state = args.state()?.unwrap_or("any");
    let after = args.number("after")?.unwrap_or(0);
    let limit = args.number("limit")?.unwrap_or(u64::MAX);
    let mut conn = ctl.connect()?;
    let tube = look::tube(&mut conn, &args.words[0])?;
    let own = if state == "reserved" { "client>CLIENT held>HELD" } else { "reserves>RESERVES" };
    let columns = format!(
        "id>ID state<STATE pri>PRI age>AGE ttr>TTR time-left>LEFT {own} bytes>BYTES body.BODY"
    );
    let mut listing = Listing::new(false, &columns);
    let mut pages = Pages::new(&tube.name, state, after, limit, false);
    show(ctl, &mut conn, &tube.name, &mut pages, &mut listing)?;
    listing.print().map(|()| 0)
}

/// Prints jobs of a tube as JSON, or adds them to a listing; returns their number.
fn show(
    ctl: &Ctl,
    conn: &mut Conn,
    tube: &str,
    pages: &mut Pages,
    listing: &mut Listing,
) -> Result<u64, Failure> {
    let mut count = 0;
    loop {
        let jobs = pages.next(conn)?;
        if jobs.is_empty() {
            return Ok(count);
        }
        count += jobs.len() as u64;
        if ctl.is_json {
            let line = |job| json_of(job, tube, None) + "\n";
            print_with(|out| out.write_all(jobs.iter().map(line).collect::<String>().as_bytes()))?;
            continue;
        }
        let is_small = |job: &&Fields| job.number("bytes") <= PREVIEW_MAX;
        let small: Vec<&Fields> = jobs.iter().filter(is_small).collect();
        let mut replies =
            conn.ask_each(&small, |job| format!("peek {}", job.text("id")))?.into_iter();
        for job in &jobs {
            let reply = if is_small(&job) { replies.next() } else { None };
            let body = reply.map_or(Ok(None), super::conn::Reply::job)?.unwrap_or_default();
            listing.add(|key| match key {
                "tube" => Cell::text(tube),
                "bytes" => Cell::number(job.number("bytes").max(body.len() as u64)),
                "body" => Cell::text(&escaped(&body[..body.len().min(PREVIEW_LEN)])),
                _ => Cell::of(job, key),
            })?;
        }
    }
}

/// Returns a job as JSON with the keys of `list-jobs`, and its tube.
fn json_of(job: &Fields, tube: &str, body: Option<&[u8]>) -> String {
    let own = job.0.iter().filter(|(key, _)| key != "tube" && key != "file");
    let mut pairs: Vec<(&str, String)> =
        own.map(|(key, value)| (key.as_str(), json_value(value))).collect();
    pairs.insert(1, ("tube", json_string(tube)));
    pairs.extend(body.map(json_body));
    json_object(pairs)
}

/// Returns the key and the value of a body in JSON, as `--dump` prints them.
pub fn json_body(body: &[u8]) -> (&'static str, String) {
    match str::from_utf8(body) {
        Ok(text) => ("body", json_string(text)),
        Err(_) => ("body_base64", format!("\"{}\"", Base64(body))),
    }
}

/// `job`
pub fn job(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let id = args::id(&args.words[0])?;
    let mut conn = ctl.connect()?;
    let gone = || Failure::new(EXIT_PARTLY, format!("job {id}: not found"));
    let mut job = look::jobs(&mut conn, &[id])?.pop().flatten().ok_or_else(gone)?;
    let body = conn.ask(&format!("peek {id}"))?.job()?.ok_or_else(gone)?;
    let tube = job.text("tube").to_owned();
    // The list also has the holder, and the number of bytes.
    let list = conn.ask(&format!("list-jobs {tube} any 1 {}", id - 1))?;
    let listed = Fields::of_entries(&String::from_utf8_lossy(&list.body)).0.pop();
    match listed.filter(|listed| listed.number("id") == id) {
        Some(listed) => job = listed,
        None => job.0.push(("bytes".into(), body.len().to_string())),
    }
    if ctl.is_json {
        print(&json_of(&job, &tube, Some(&body)))?;
    } else if !args.has("body") {
        let keys = job.0.iter().filter(|(key, _)| key != "tube");
        let lines: String = keys.map(|(key, value)| format!("{key}: {value}\n")).collect();
        print(&format!("tube: {tube}\n{lines}body: {}", escaped(&body)))?;
    } else if terminal_size().is_some() {
        print(&escaped(&body))?;
    } else {
        print_with(|out| out.write_all(&body))?;
    }
    Ok(0)
}

/// `workers`
pub fn workers(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let tube = args.words.first().map(|name| args::tube(name)).transpose()?;
    let of_tube = tube.map_or(String::new(), |tube| format!(" {tube}"));
    let mut conn = ctl.connect()?;
    let (mut clients, mut after) = (Vec::new(), 0);
    loop {
        let list = conn.ask(&format!("list-clients 1000 {after}{of_tube}"))?;
        let gone = || Failure::new(EXIT_PARTLY, format!("tube{of_tube}: not found"));
        let (page, next) = Fields::of_entries(&list.document("list-clients")?.ok_or_else(gone)?);
        clients.extend(page);
        after = next;
        if after == 0 {
            break;
        }
    }
    // The tool itself is left out. Over a Unix socket it is the youngest client.
    let is_own = |client: &&Fields| client.text("address") == conn.own_address;
    let own = clients.iter().filter(is_own).min_by_key(|client| client.number("age"));
    let own = own.map(|client| client.number("id"));
    clients.retain(|client| Some(client.number("id")) != own);
    let mut holds = held_jobs(&mut conn, &clients)?;
    clients.sort_by_cached_key(|client| {
        let jobs = holds.get(&client.number("id"));
        Reverse(jobs.map(|jobs| jobs[0].number("held")))
    });
    const COLUMNS: &str = "id>CLIENT address~ADDRESS age>AGE activity<ACTIVITY reserved! \
                           watching>WATCHING using~USING jobs.HOLDS";
    let mut listing = Listing::new(ctl.is_json, COLUMNS);
    for client in clients {
        let jobs = holds.remove(&client.number("id")).unwrap_or_default();
        let hold = |job: &Fields| {
            let [id, tube] = ["id", "tube"].map(|key| job.text(key));
            format!("job {id} of {tube} {}", span(job.number("held")))
        };
        listing.add(|key| match key {
            "jobs" => {
                let json = jobs.iter().map(|job| json_of(job, job.text("tube"), None));
                let [json, text] = [json.collect(), jobs.iter().map(hold).collect()]
                    .map(|list: Vec<String>| list.join(", "));
                Cell(format!("[{json}]"), text)
            }
            _ => Cell::of(&client, key),
        })?;
    }
    listing.print().map(|()| 0)
}

/// Returns the jobs that clients hold, the longest held first, by the number of the client.
fn held_jobs(conn: &mut Conn, clients: &[Fields]) -> Result<HashMap<u64, Vec<Fields>>, Failure> {
    let mut holds: HashMap<u64, Vec<Fields>> = HashMap::new();
    if clients.iter().all(|client| client.number("reserved") == 0) {
        return Ok(holds);
    }
    let names = look::tube_names(conn)?;
    for tube in look::tubes(conn, &names)?.iter().filter(|tube| tube.jobs("reserved") > 0) {
        let mut pages = Pages::new(&tube.name, "reserved", 0, u64::MAX, false);
        while let jobs @ [_, ..] = &mut pages.next(conn)?[..] {
            for job in jobs {
                job.0.push(("tube".into(), json_string(&tube.name)));
                holds.entry(job.number("client")).or_default().push(job.clone());
            }
        }
    }
    holds.values_mut().for_each(|jobs| jobs.sort_by_key(|job| Reverse(job.number("held"))));
    Ok(holds)
}
