//! `failed`, `jobs`, `job` and `workers`: lists that change nothing.

use super::args::{self, id};
use super::conn::{Conn, Fields};
use super::look::{self, Otherwise, Pages};
use super::print::{Column, Table, escaped, is_terminal, json_object, json_string, span};
use super::{Args, Ctl, EXIT_PARTLY, complain, print, unwritten};
use crate::os::failure::Failure;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{self, BufWriter, Write};

/// The largest body of which a list shows the beginning.
const PREVIEW_MAX: u64 = 65_536;

/// The number of bytes of a body in a list: more than a line has.
const PREVIEW_LEN: usize = 256;

/// The last column, which shows the beginning of the body.
const BODY: &str = "BODY";

/// `failed`
pub fn failed(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let mut left = args.number("limit")?.unwrap_or(u64::MAX);
    let mut conn = ctl.connect()?;
    let tubes = match args.words.first() {
        Some(name) => vec![look::tube(&mut conn, name)?],
        None => {
            let mut names = look::tube_names(&mut conn)?;
            names.sort();
            look::tubes(&mut conn, &names)?
        }
    };
    let mut columns = vec![Column::Number("ID"), Column::Name("TUBE")];
    let numbers = ["age", "reserves", "timeouts", "buries", "bytes"];
    columns.extend(["AGE", "RESERVES", "TIMEOUTS", "BURIES", "BYTES"].map(Column::Number));
    columns.push(Column::Text(BODY));
    let mut table = Table::new(&columns);
    let mut is_cut = false;
    for tube in tubes.iter().filter(|tube| tube.buried > 0) {
        let mut pages = Pages::new(&tube.name, "buried", 0, left);
        let mut count = 0;
        while let jobs @ [_, ..] = &pages.next(&mut conn, Otherwise::Peek)?[..] {
            show(ctl, &mut conn, &tube.name, jobs, &mut table, &numbers)?;
            count += jobs.len() as u64;
        }
        is_cut |= pages.peeks() && count < tube.buried;
        left -= count;
    }
    if is_cut {
        complain("this server has no list-jobs: only the first buried job of a tube is shown");
    }
    Ok(0)
}

/// `jobs`
pub fn jobs(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let state = args.state("any")?;
    let after = args.number("after")?.unwrap_or(0);
    let limit = args.number("limit")?.unwrap_or(u64::MAX);
    let mut conn = ctl.connect()?;
    let tube = look::tube(&mut conn, &args.words[0])?;
    let mut columns = vec![Column::Number("ID"), Column::Word("STATE")];
    let mut numbers = vec!["pri", "age", "ttr", "time-left", "reserves", "bytes"];
    columns.extend(["PRI", "AGE", "TTR", "LEFT", "RESERVES", "BYTES"].map(Column::Number));
    if state == "reserved" {
        numbers.extend(["client", "held"]);
        columns.extend(["CLIENT", "HELD"].map(Column::Number));
    }
    columns.push(Column::Text(BODY));
    let mut table = Table::new(&columns);
    let mut pages = Pages::new(&tube.name, state, after, limit);
    while let jobs @ [_, ..] = &pages.next(&mut conn, Otherwise::Fail)?[..] {
        show(ctl, &mut conn, &tube.name, jobs, &mut table, &numbers)?;
    }
    Ok(0)
}

/// Prints a page of jobs, with these numbers in a table.
fn show(
    ctl: &Ctl,
    conn: &mut Conn,
    tube: &str,
    jobs: &[Fields],
    table: &mut Table,
    numbers: &[&str],
) -> Result<(), Failure> {
    let mut out = BufWriter::new(io::stdout().lock());
    if ctl.is_json {
        for job in jobs {
            writeln!(out, "{}", json_of(job, tube, Vec::new())).map_err(unwritten)?;
        }
        return out.flush().map_err(unwritten);
    }
    let bodies = look::bodies(conn, jobs, PREVIEW_MAX)?;
    let has_tube = numbers[0] == "age";
    for (job, body) in jobs.iter().zip(bodies) {
        let second = if has_tube { tube } else { job.text("state") };
        let mut row = vec![job.text("id").to_owned(), second.to_owned()];
        for &key in numbers {
            row.push(match key {
                "age" | "ttr" | "time-left" | "held" => span(job.number(key)),
                "bytes" if job.text(key).is_empty() => {
                    body.as_ref().map_or(String::new(), |body| body.len().to_string())
                }
                _ => job.text(key).to_owned(),
            });
        }
        let body = body.unwrap_or_default();
        row.push(escaped(&body[..body.len().min(PREVIEW_LEN)]));
        table.add(row);
    }
    table.print(&mut out).and_then(|()| out.flush()).map_err(unwritten)
}

/// Returns a job as JSON with the keys of `list-jobs`, its tube, and more.
fn json_of(job: &Fields, tube: &str, more: Vec<(&str, String)>) -> String {
    let mut pairs: Vec<(&str, String)> =
        job.0.iter().map(|(key, value)| (key.as_str(), json_value(value))).collect();
    pairs.retain(|(key, _)| !["tube", "file"].contains(key));
    pairs.insert(1, ("tube", json_string(tube)));
    pairs.extend(more);
    json_object(pairs)
}

/// Returns a value of a document as JSON: a number, a string that has quotes, or a word.
fn json_value(value: &str) -> String {
    match value.as_bytes() {
        [b'"', ..] => value.to_owned(),
        digits if digits.iter().all(u8::is_ascii_digit) => value.to_owned(),
        _ => json_string(value),
    }
}

/// `job`
pub fn job(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let id = id(&args.words[0])?;
    let mut conn = ctl.connect()?;
    let gone = || Failure::new(EXIT_PARTLY, format!("job {id}: not found"));
    let mut job = look::jobs(&mut conn, &[id])?.pop().flatten().ok_or_else(gone)?;
    let body = conn.ask(&format!("peek {id}"))?;
    if body.is("NOT_FOUND") {
        return Err(gone());
    }
    let body = body.found()?;
    let tube = job.text("tube").to_owned();
    // The list also knows the holder, and the number of bytes.
    let list = conn.ask(&format!("list-jobs {tube} any 1 {}", id - 1))?;
    let listed = Fields::of_entries(&String::from_utf8_lossy(&list.body)).0.pop();
    match listed.filter(|listed| listed.number("id") == id) {
        Some(listed) => job = listed,
        None => job.0.push(("bytes".into(), body.len().to_string())),
    }
    if ctl.is_json {
        let body = match str::from_utf8(&body) {
            Ok(text) => ("body", json_string(text)),
            Err(_) => ("body_base64", format!("\"{}\"", crate::engine::text::Base64(&body))),
        };
        print(&json_of(&job, &tube, vec![body]))?;
    } else if !args.has("body") {
        let keys = job.0.iter().filter(|(key, _)| key != "tube");
        let lines = keys.map(|(key, value)| format!("{key}: {value}\n"));
        print(&format!("tube: {tube}\n{}body: {}", lines.collect::<String>(), escaped(&body)))?;
    } else if is_terminal() {
        print(&escaped(&body))?;
    } else {
        let mut out = io::stdout().lock();
        out.write_all(&body).and_then(|()| out.flush()).map_err(unwritten)?;
    }
    Ok(0)
}

/// `workers`
pub fn workers(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let tube = args.words.first().map(|name| args::tube(name)).transpose()?;
    let mut conn = ctl.connect()?;
    let (mut clients, mut after) = (Vec::new(), 0);
    loop {
        let suffix = tube.map_or(String::new(), |tube| format!(" {tube}"));
        let list = conn.ask(&format!("list-clients 1000 {after}{suffix}"))?;
        let Some(list) = list.document("list-clients")? else {
            let message = format!("tube {}: not found", tube.unwrap_or_default());
            return Err(Failure::new(EXIT_PARTLY, message));
        };
        let (page, next) = Fields::of_entries(&list);
        clients.extend(page);
        after = next;
        if after == 0 {
            break;
        }
    }
    // The tool is no client of interest. Over a Unix socket it is the one that has just connected.
    let is_own = |client: &&Fields| client.text("address") == conn.own_address;
    let own = clients.iter().filter(is_own).min_by_key(|client| client.number("age"));
    let own = own.map(|client| client.number("id"));
    clients.retain(|client| Some(client.number("id")) != own);
    let mut holds = held_jobs(&mut conn, &clients)?;
    clients.sort_by_cached_key(|client| {
        let jobs = holds.get(&client.number("id"));
        Reverse(jobs.and_then(|jobs| jobs.first()).map(|job| job.number("held")))
    });
    let mut out = BufWriter::new(io::stdout().lock());
    let mut table = Table::new(&[
        Column::Number("CLIENT"),
        Column::Name("ADDRESS"),
        Column::Number("AGE"),
        Column::Word("ACTIVITY"),
        Column::Number("WATCHING"),
        Column::Name("USING"),
        Column::Text("HOLDS"),
    ]);
    for client in clients {
        let jobs = holds.remove(&client.number("id")).unwrap_or_default();
        if ctl.is_json {
            let job = |job: &Fields| {
                let keys = ["id", "tube", "held"];
                json_object(keys.map(|key| (key, json_value(job.raw(key)))))
            };
            let jobs: Vec<String> = jobs.iter().map(job).collect();
            let mut pairs: Vec<(&str, String)> =
                client.0.iter().map(|(key, value)| (key.as_str(), json_value(value))).collect();
            pairs.push(("jobs", format!("[{}]", jobs.join(","))));
            writeln!(out, "{}", json_object(pairs)).map_err(unwritten)?;
            continue;
        }
        let holds = jobs.iter().map(|job| {
            format!("job {} of {} {}", job.text("id"), job.text("tube"), span(job.number("held")))
        });
        table.add(vec![
            client.text("id").to_owned(),
            client.text("address").to_owned(),
            span(client.number("age")),
            client.text("activity").to_owned(),
            client.text("watching").to_owned(),
            client.text("using").to_owned(),
            holds.collect::<Vec<_>>().join(", "),
        ]);
    }
    table.print(&mut out).and_then(|()| out.flush()).map_err(unwritten)?;
    Ok(0)
}

/// Returns the jobs that clients hold, the longest held first, by the number of the client.
fn held_jobs(conn: &mut Conn, clients: &[Fields]) -> Result<HashMap<u64, Vec<Fields>>, Failure> {
    let mut holds: HashMap<u64, Vec<Fields>> = HashMap::new();
    if clients.iter().all(|client| client.number("reserved") == 0) {
        return Ok(holds);
    }
    let names = look::tube_names(conn)?;
    for tube in look::tubes(conn, &names)?.into_iter().filter(|tube| tube.held > 0) {
        let mut pages = Pages::new(&tube.name, "reserved", 0, u64::MAX);
        while let jobs @ [_, ..] = &pages.next(conn, Otherwise::Fail)?[..] {
            for job in jobs {
                let mut job = job.clone();
                job.0.push(("tube".into(), json_string(&tube.name)));
                holds.entry(job.number("client")).or_default().push(job);
            }
        }
    }
    for jobs in holds.values_mut() {
        jobs.sort_by_key(|job| Reverse(job.number("held")));
    }
    Ok(holds)
}
