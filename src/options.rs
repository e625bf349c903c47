//! Parses the command line into [`Options`]: every flag, its meaning and its default.
//!
//! The flags are those of C, with long forms, and some more. The values are checked here,
//! so that options need no further checks.

mod etcd;

use crate::engine::binlog::Syncing;
use crate::engine::limits::Settings;
use crate::engine::time::Nanos;
use crate::flags::{self, A_SIZE, Flags, UsageError, is_digits, number, size};
use crate::os::listen::{Address, Port};
use log::LevelFilter;
use std::ffi::OsString;
use std::num::NonZero;
use std::path::PathBuf;

pub use crate::os::membership::EtcdOptions;

/// What the command line asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum Mode {
    /// Serve clients.
    Serve(Box<Options>),
    /// Print the usage.
    Help,
    /// Print the version.
    Version,
    /// Print the contents of each file of this binlog, and whether it is damaged.
    Check(BinlogPlace),
    /// Print every job of this binlog.
    Dump(BinlogPlace),
    /// Copy the binlog in this directory to etcd.
    Import(PathBuf, EtcdOptions),
    /// Copy the binlog in etcd to this directory.
    Export(PathBuf, EtcdOptions),
    /// End the lease of a killed server that this file names.
    Leave(PathBuf, Option<BinlogPlace>),
}

/// Where a binlog is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BinlogPlace {
    /// In this directory.
    Directory(PathBuf),
    /// In etcd.
    Etcd(EtcdOptions),
}

/// The configuration of the server.
#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    /// Where the binlog is; `None` means no binlog.
    pub binlog: Option<BinlogPlace>,
    /// When to sync the binlog.
    pub fsync: Syncing,
    /// The limits of jobs, memory and binlog.
    pub settings: Settings,
    /// The address for clients.
    pub listen: Address,
    /// A flag has set `listen`.
    pub names_address: bool,
    /// The user of the process after binding: a name, or numbers.
    pub user: Option<String>,
    /// The maximum number of connected clients, if there is one.
    pub max_connections: Option<usize>,
    /// The address to serve metrics on; `None` means no metrics.
    pub metrics: Option<Address>,
    /// The verbosity of the log.
    pub log_level: LevelFilter,
    /// The format of log lines.
    pub log_format: LogFormat,
    /// Warnings about flags, for the log.
    pub warnings: Vec<String>,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Text: the time, the level and the message.
    Text,
    /// A JSON object with the same three values.
    Json,
}

/// The levels of the log, by the number of `-V`.
const LEVELS: [LevelFilter; 4] =
    [LevelFilter::Warn, LevelFilter::Info, LevelFilter::Debug, LevelFilter::Trace];

const DEFAULT_FSYNC_MS: u64 = 50;
/// The TCP port without `-p`.
pub const DEFAULT_PORT: u16 = 11300;
const DEFAULT_METRICS_TUBES: usize = 1000;

/// The largest body that may be allowed: 1 GiB.
pub const MAX_JOB_SIZE: u32 = 1 << 30;

/// The size of a binlog file is a multiple of this many bytes.
const FILE_SIZE_UNIT: u32 = 4096;

/// Parses the arguments after the program's name. An error says what is wrong with them.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Mode, String> {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let ends_flags = arguments.iter().any(|argument| argument == "--");
    let flags = Flags::parse(&parser(true), arguments)?;
    if flags.has("h") {
        return Ok(Mode::Help);
    }
    if flags.has("v") {
        return Ok(Mode::Version);
    }
    // As in C beanstalkd: there is nothing that could follow.
    if ends_flags {
        return wrong("unknown flag: --");
    }
    if let Some(argument) = flags.words.first() {
        return wrong(format!("unknown argument: {argument}"));
    }
    let modes: Vec<&str> = MODES.into_iter().filter(|mode| flags.has(mode)).collect();
    let mode = match modes[..] {
        [] => return options(&flags).map(|options| Mode::Serve(Box::new(options))),
        [mode] => mode,
        _ => return wrong("--check, --dump, --import, --export and --leave exclude each other"),
    };
    let file = PathBuf::from(flags.text(mode).unwrap_or_default());
    match (mode, binlog_place(&flags)?) {
        ("check", Some(place)) => Ok(Mode::Check(place)),
        ("dump", Some(place)) => Ok(Mode::Dump(place)),
        ("check" | "dump", None) => wrong("no directory: -b is missing"),
        ("import", Some(BinlogPlace::Etcd(etcd))) => Ok(Mode::Import(file, etcd)),
        ("export", Some(BinlogPlace::Etcd(etcd))) => Ok(Mode::Export(file, etcd)),
        ("import" | "export", _) => wrong("--import and --export need a URL of etcd with -b"),
        (_, place) => Ok(Mode::Leave(file, place)),
    }
}

/// The flags of the modes in which no client is served.
const MODES: [&str; 5] = ["check", "dump", "import", "export", "leave"];

fn wrong<T>(why: impl Into<String>) -> Result<T, String> {
    Err(why.into())
}

/// Returns the output of `-v`.
pub fn version() -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!("beanstalkd {} (beanstalkd-server {version})", crate::engine::protocol::stats::VERSION)
}

/// Returns the output of `-h`, with or without the flags that need the feature `etcd`.
pub fn usage(with_etcd: bool) -> String {
    parser(with_etcd).usage("Use: beanstalkd [OPTIONS]").trim_end().to_owned()
}

/// Each flag: its names, its argument if it has one, and its help.
const FLAGS: &str = "\
-b --binlog-dir DIR: keep jobs on disk, in a binlog in this directory{or etcd} (default: none)
-f --fsync-ms MS: sync the binlog at most MS milliseconds after a write; 0 syncs before each reply (default: 50)
-F --no-fsync: never sync the binlog
-l --listen ADDR: listen on this IPv4 or IPv6 address, host name or unix:PATH (default: all addresses)
-p --port PORT: listen on this TCP port: a number, or a name in /etc/services (default: 11300)
-s --binlog-file-size BYTES: size of a binlog file, rounded up to a multiple of 4096 (default: 10485760)
--binlog-limit BYTES: answer puts with OUT_OF_MEMORY when the binlog would take more (default: none)
--socket-mode MODE: permissions of Unix sockets, in octal, such as 660 (default: set by the umask)
-u --user USER: become this user and its group after binding: a name, UID or UID:GID (default: no change)
-z --max-job-size BYTES: size of the largest job allowed, at most 1G (default: 65535)
--max-memory BYTES: answer puts with OUT_OF_MEMORY when jobs would take more than BYTES of memory (default: no limit)
--body-cache BYTES: keep at most BYTES of bodies in memory and read the others back from -b DIR (default: all in memory)
--bury-after N: bury a job that came back N times because its TTR ran out or its worker was gone (default: never)
--max-connections N: serve at most N clients at once; more clients wait (default: limit of open files)
--metrics ADDR:PORT: serve metrics and a status page over HTTP at ADDR:PORT or unix:PATH (default: none)
--metrics-tubes N: list N tubes one by one in the metrics, and sum the others (default: 1000)
--log-format FORMAT: format of log lines: text, or json for one object a line (default: text)
--check: check the binlog of -b, print a summary of each file, and exit
--dump: print the jobs of the binlog of -b, one JSON object a line, and exit
-c: ignored: the binlog is always compacted
-n: ignored: the binlog is always compacted
-v --version: print the version and exit
-V --verbose: increase verbosity: -V info, -VV debug, -VVV trace (default: warnings)
-h --help: print this help and exit";

fn parser(with_etcd: bool) -> getopts::Options {
    let (or_etcd, etcd_flags) = match with_etcd {
        true => (", or in etcd://HOST:PORT,.../PREFIX", etcd::FLAGS),
        false => ("", ""),
    };
    let own = FLAGS.replace("{or etcd}", or_etcd);
    flags::parser(own.lines().chain(etcd_flags.lines()))
}

impl Flags {
    /// Returns a size that C limits too. A larger one becomes `most`, with a warning.
    fn limited_size(
        &self,
        flag: &str,
        default: u32,
        most: u32,
        what: &str,
        warnings: &mut Vec<String>,
    ) -> Result<u32, UsageError> {
        let parse = |text: &str| c_number(text).or_else(|| size(text));
        let asked = self.value(flag, A_SIZE, parse)?.unwrap_or(default.into());
        if asked > most.into() {
            let asked = self.text(flag).unwrap_or_default();
            warnings.push(format!("-{flag} {asked}: above the maximum; {what} is {most} bytes"));
        }
        Ok(u32::try_from(asked).map_or(most, |asked| asked.min(most)))
    }

    fn file_size(&self, warnings: &mut Vec<String>) -> Result<u32, UsageError> {
        const LARGEST: u32 = u32::MAX / FILE_SIZE_UNIT * FILE_SIZE_UNIT;
        let default = Settings::DEFAULT.binlog_file_size;
        let what = "the size of a binlog file";
        let size = self.limited_size("s", default, LARGEST, what, warnings)?;
        Ok(size.max(1).next_multiple_of(FILE_SIZE_UNIT))
    }
}

fn binlog_place(flags: &Flags) -> Result<Option<BinlogPlace>, String> {
    let for_etcd = ["lease-ttl", "etcd-quota", "etcd-ca", "etcd-cert", "etcd-key"];
    match flags.text("b") {
        Some(path) if path.is_empty() => wrong("-b needs a directory"),
        Some(url) if etcd::is_url(&url) => {
            etcd::etcd_options(&url, flags).map(|etcd| Some(BinlogPlace::Etcd(etcd)))
        }
        place => match for_etcd.into_iter().find(|flag| flags.has(flag)) {
            Some(flag) => wrong(format!("--{flag} needs a URL of etcd with -b")),
            None => Ok(place.map(|path| BinlogPlace::Directory(path.into()))),
        },
    }
}

fn options(flags: &Flags) -> Result<Options, String> {
    let ignored = ["c", "n"].into_iter().filter(|flag| flags.has(flag));
    let no_effect = |flag| format!("-{flag} has no effect: the binlog is always compacted");
    let mut warnings: Vec<String> = ignored.map(no_effect).collect();
    let mode = flags.value("socket-mode", "an octal number from 0 to 777", |text| {
        // `from_str_radix` accepts a sign too.
        u32::from_str_radix(text, 8).ok().filter(|&mode| is_digits(text) && mode <= 0o777)
    })?;
    let listen = listen_address(flags, mode)?;
    let metrics = flags.text("metrics").map(|text| metrics_address(&text, mode)).transpose()?;
    let is_unix = |address: &Address| matches!(address, Address::Unix { .. });
    if mode.is_some() && !is_unix(&listen) && !metrics.as_ref().is_some_and(is_unix) {
        warnings.push("--socket-mode has no effect without unix: in -l or --metrics".to_owned());
    }
    if is_unix(&listen) && metrics.as_ref() == Some(&listen) {
        return wrong("--metrics and -l cannot have the same Unix socket");
    }
    let binlog = binlog_place(flags)?;
    if binlog.is_none() && flags.has("binlog-limit") {
        warnings.push("--binlog-limit has no effect without -b".to_owned());
    }
    let default_limit = match binlog {
        Some(BinlogPlace::Etcd(_)) => etcd::DEFAULT_BINLOG_LIMIT,
        Some(BinlogPlace::Directory(_)) | None => Settings::DEFAULT.max_binlog_bytes,
    };
    let metrics_tubes = flags.number("metrics-tubes")?.unwrap_or(DEFAULT_METRICS_TUBES);
    let settings = Settings {
        binlog_file_size: flags.file_size(&mut warnings)?,
        max_binlog_bytes: flags.size("binlog-limit")?.unwrap_or(default_limit),
        max_job_size: {
            let default = Settings::DEFAULT.max_job_size;
            flags.limited_size("z", default, MAX_JOB_SIZE, "the largest job", &mut warnings)?
        },
        max_memory_bytes: flags.size("max-memory")?.unwrap_or(Settings::DEFAULT.max_memory_bytes),
        body_cache_bytes: body_cache(flags, binlog.as_ref())?,
        bury_after: flags.value("bury-after", "a number from 1 to 65535", number)?,
        metrics_tubes: metrics.as_ref().map(|_| metrics_tubes),
    };
    let max_connections = flags.value("max-connections", "a number from 1 on", number)?;
    let log_format = flags.value("log-format", "text or json", |text| match text {
        "text" => Some(LogFormat::Text),
        "json" => Some(LogFormat::Json),
        _ => None,
    })?;
    Ok(Options {
        binlog,
        fsync: fsync(flags)?,
        listen,
        settings,
        names_address: flags.has("l") || flags.has("p"),
        user: flags.text("u"),
        max_connections: max_connections.map(NonZero::get),
        metrics,
        log_level: LEVELS[flags.count("V").min(LEVELS.len() - 1)],
        log_format: log_format.unwrap_or(LogFormat::Text),
        warnings,
    })
}

/// Returns the bytes of `--body-cache`, which needs the files of a directory.
fn body_cache(flags: &Flags, binlog: Option<&BinlogPlace>) -> Result<Option<u64>, String> {
    let bytes = flags.size("body-cache")?;
    let refused = match binlog {
        _ if bytes.is_none() => return Ok(None),
        Some(BinlogPlace::Directory(_)) => return Ok(bytes),
        None => "needs -b DIR: without a binlog, a body is only in memory",
        Some(BinlogPlace::Etcd(_)) => "needs -b DIR: bodies cannot be read back from etcd",
    };
    wrong(format!("--body-cache {refused}"))
}

fn fsync(flags: &Flags) -> Result<Syncing, String> {
    let millis = flags.value("f", "a number in range", c_number)?.unwrap_or(DEFAULT_FSYNC_MS);
    // As in C, signed nanoseconds that overflow are 0.
    let nanos = millis.wrapping_mul(1_000_000);
    Ok(if flags.has("F") && !flags.is_last("f", "F") {
        Syncing::Never
    } else if nanos == 0 || i64::try_from(nanos).is_err() {
        Syncing::EachIteration
    } else {
        Syncing::Within(Nanos::from_nanos(nanos))
    })
}

fn listen_address(flags: &Flags, mode: Option<u32>) -> Result<Address, String> {
    let port = flags.value("p", "a number in range", |text| match c_number(text) {
        Some(number) => u16::try_from(number).ok().map(Port::Number),
        // The name of a service is resolved at the start.
        None => (!text.is_empty()).then(|| Port::Service(text.to_owned())),
    })?;
    // The resolver of C beanstalkd takes `*` for any address.
    let host = flags.text("l").filter(|host| host != "*");
    match host.as_ref().and_then(|host| host.strip_prefix("unix:")) {
        Some("") => wrong("-l unix: needs a path"),
        Some(path) => Ok(Address::Unix { path: path.into(), mode }),
        None => Ok(Address::Tcp { host, port: port.unwrap_or(Port::Number(DEFAULT_PORT)) }),
    }
}

fn metrics_address(text: &str, mode: Option<u32>) -> Result<Address, String> {
    let wrong = || format!("--metrics {text}: not ADDR:PORT, as in [::1]:9100, or unix:PATH");
    if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
        return Ok(Address::Unix { path: path.into(), mode });
    }
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let port = Port::Number(number(port).ok_or_else(wrong)?);
    let literal = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host = literal.or((!host.contains(':')).then_some(host)).ok_or_else(wrong)?;
    Ok(Address::Tcp { host: (!host.is_empty()).then(|| host.to_owned()), port })
}

/// Parses a decimal number as strtoul(3) does: blanks and a sign may precede it, a larger number than
/// 2^64 - 1 becomes that, and a negative one counts back from 2^64. Nothing may follow.
fn c_number(text: &str) -> Option<u64> {
    let text = text.trim_start_matches([' ', '\t', '\n', '\x0b', '\x0c', '\r']);
    let (digits, is_negative) = match text.strip_prefix('-') {
        Some(digits) => (digits, true),
        None => (text.strip_prefix('+').unwrap_or(text), false),
    };
    if !is_digits(digits) {
        return None;
    }
    match digits.parse::<u64>() {
        Ok(number) if is_negative => Some(number.wrapping_neg()),
        // Digits alone can be wrong in one way only.
        number => Some(number.unwrap_or(u64::MAX)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Mode, String> {
        parse(arguments.iter().map(OsString::from))
    }

    fn options(arguments: &[&str]) -> Options {
        match parsed(arguments) {
            Ok(Mode::Serve(options)) => *options,
            other => panic!("{arguments:?} gave {other:?}"),
        }
    }

    fn unix(mode: Option<u32>) -> Address {
        Address::Unix { path: "/x".into(), mode }
    }

    fn tcp(host: Option<&str>, port: u16) -> Address {
        Address::Tcp { host: host.map(str::to_owned), port: Port::Number(port) }
    }

    fn error_of(arguments: &[&str]) -> String {
        parsed(arguments).expect_err("these arguments are wrong")
    }

    #[test]
    fn defaults() {
        let options = options(&[]);
        assert_eq!((options.listen, options.settings.max_job_size), (tcp(None, 11300), 65535));
        assert_eq!(options.settings.binlog_file_size, 10_485_760);
        assert_eq!(options.fsync, Syncing::Within(Nanos::from_millis(50)));
        assert_eq!(options.log_level, LevelFilter::Warn);
        assert_eq!((options.binlog, options.user, options.names_address), (None, None, false));
        assert_eq!((options.settings.max_memory_bytes, options.max_connections), (u64::MAX, None));
        assert_eq!((options.metrics, options.settings.metrics_tubes), (None, None));
        assert_eq!(options.log_format, LogFormat::Text);
    }

    #[test]
    fn flags_cluster_and_take_their_argument_attached_or_apart() {
        assert_eq!(options(&["-p12"]).listen, tcp(None, 12));
        assert_eq!(options(&["-p", "12"]).listen, tcp(None, 12));
        assert_eq!(options(&["--port=12"]).listen, tcp(None, 12));
        assert_eq!(options(&["--port", "12"]).listen, tcp(None, 12));
        assert_eq!(options(&["-VVV"]).log_level, LevelFilter::Trace);
        let clustered = options(&["-VFVu", "nobody"]);
        assert_eq!(clustered.log_level, LevelFilter::Debug);
        assert_eq!(clustered.fsync, Syncing::Never);
        assert_eq!(clustered.user.as_deref(), Some("nobody"));
    }

    #[test]
    fn the_last_one_wins() {
        assert_eq!(options(&["-p1", "-p", "2"]).listen, tcp(None, 2));
        assert_eq!(options(&["-l", "::1", "-lunix:/x"]).listen, unix(None));
        let modes = ["-lunix:/x", "--socket-mode", "660", "--socket-mode=600"];
        assert_eq!(options(&modes).listen, unix(Some(0o600)));
        assert_eq!(options(&["-l", "localhost"]).listen, tcp(Some("localhost"), 11300));
    }

    #[test]
    fn the_mode_of_a_socket_is_octal() {
        for (text, mode) in [("0", 0), ("600", 0o600), ("0660", 0o660), ("777", 0o777)] {
            let options = options(&["--socket-mode", text, "-l", "unix:/x"]);
            assert_eq!((options.listen, options.warnings.len()), (unix(Some(mode)), 0));
        }
        for text in ["", "+660", "-660", "668", "0x1ff", "0o660", "1000", "4755", "6 0", "u=rw"] {
            let error = error_of(&["-l", "unix:/x", "--socket-mode", text]);
            assert_eq!(error, format!("--socket-mode {text}: not an octal number from 0 to 777"));
        }
        for address in ["::1", "/x"] {
            let options = options(&["--socket-mode", "660", "-l", address]);
            assert_eq!(
                options.warnings,
                ["--socket-mode has no effect without unix: in -l or --metrics"]
            );
        }
        assert_eq!(options(&["--socket-mode", "660"]).warnings.len(), 1);
        let both = options(&["--socket-mode", "660", "--metrics", "unix:/x"]);
        assert_eq!((both.metrics, both.warnings.len()), (Some(unix(Some(0o660))), 0));
        let twice = error_of(&["-l", "unix:/x", "--metrics", "unix:/x"]);
        assert_eq!(twice, "--metrics and -l cannot have the same Unix socket");
    }

    #[test]
    fn sizes_are_brought_into_range() {
        let warning = "--binlog-limit has no effect without -b";
        assert_eq!(options(&["--binlog-limit", "1M"]).warnings, [warning]);
        assert!(options(&["--binlog-limit", "1M", "-b", "/x"]).warnings.is_empty());
        assert_eq!(options(&["-z", "0"]).settings.max_job_size, 0);
        let lowered = options(&["-z", "99999999999"]);
        assert_eq!(lowered.settings.max_job_size, MAX_JOB_SIZE);
        assert_eq!(lowered.warnings.len(), 1);
        assert!(options(&["-z", "1G"]).warnings.is_empty());
        assert_eq!(options(&["-s", "0"]).settings.binlog_file_size, 4096);
        assert_eq!(options(&["-s", "1"]).settings.binlog_file_size, 4096);
        assert_eq!(options(&["-s", "4097"]).settings.binlog_file_size, 8192);
        let lowered = options(&["-s", "4294967295"]);
        assert_eq!((lowered.settings.binlog_file_size, lowered.warnings.len()), (4_294_963_200, 1));
    }

    /// As C beanstalkd 1.12 takes them.
    #[test]
    fn numbers_are_those_of_c() {
        for (text, size) in [
            ("+100", 100),
            (" 100", 100),
            ("\t5", 5),
            ("010", 10),
            ("-0", 0),
            ("-1", MAX_JOB_SIZE),
            ("4294967296", MAX_JOB_SIZE),
            ("18446744073709551615", MAX_JOB_SIZE),
            ("18446744073709551616", MAX_JOB_SIZE),
            ("-18446744073709551615", 1),
        ] {
            assert_eq!(options(&["-z", text]).settings.max_job_size, size, "{text:?}");
        }
        let within = |millis: u64| Syncing::Within(Nanos::from_millis(millis));
        for (text, fsync) in [
            ("+7", within(7)),
            ("4294967296", within(4_294_967_296)),
            ("0", Syncing::EachIteration),
            ("-1", Syncing::EachIteration),
            ("18446744073709551616", Syncing::EachIteration),
        ] {
            assert_eq!(options(&["-f", text]).fsync, fsync, "{text:?}");
        }
        for (flags, fsync) in [
            (["-F", "-f0"], Syncing::EachIteration),
            (["-V", "-Ff0"], Syncing::EachIteration),
            (["-f0", "-FV"], Syncing::Never),
        ] {
            assert_eq!(options(&flags).fsync, fsync, "{flags:?}");
        }
        assert_eq!(options(&["-s", "+4096"]).settings.binlog_file_size, 4096);
        assert_eq!(options(&["-s", "-1"]).settings.binlog_file_size, 4_294_963_200);
        for (text, number) in [("+21399", 21399), (" 21399", 21399), ("021399", 21399), ("-0", 0)] {
            assert_eq!(options(&["-p", text]).listen, tcp(None, number), "{text:?}");
        }
        assert_eq!(options(&["-l", "*"]).listen, tcp(None, DEFAULT_PORT));
        for name in ["http-alt", "21399x", "0x5397", "21399 "] {
            let port = Port::Service(name.to_owned());
            assert_eq!(options(&["-p", name]).listen, Address::Tcp { host: None, port });
        }
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        assert_eq!(error_of(&["-X"]), "unknown flag: -X");
        assert_eq!(error_of(&["-é"]), "unknown flag: -é");
        assert_eq!(error_of(&["--nosuch"]), "unknown flag: --nosuch");
        assert_eq!(error_of(&["-V", "--"]), "unknown flag: --");
        assert_eq!(error_of(&["-p"]), "flag requires an argument: -p");
        assert_eq!(error_of(&["--help=1"]), "flag takes no argument: --help");
        assert_eq!(error_of(&["work"]), "unknown argument: work");
        assert_eq!(error_of(&["-l", "unix:"]), "-l unix: needs a path");
        assert_eq!(error_of(&["-b", ""]), "-b needs a directory");
        for arguments in [
            ["-p", "65536"],
            ["-p", "-1"],
            ["-p", ""],
            ["-f", ""],
            ["-f", "1K"],
            ["--metrics-tubes", "1K"],
        ] {
            assert!(error_of(&arguments).contains("not a number in range"), "{arguments:?}");
        }
        assert!(error_of(&["-zx", "-z5"]).contains("-z x: not"));
    }

    #[test]
    fn sizes_have_suffixes() {
        let max_job_size = |text| options(&["-z", text]).settings.max_job_size;
        for (text, bytes) in
            [("65535", 65_535), ("64K", 65_536), ("1M", 1 << 20), ("1G", 1 << 30), ("9G", 1 << 30)]
        {
            assert_eq!(max_job_size(text), bytes, "{text}");
        }
        assert_eq!(options(&["-s", "5K"]).settings.binlog_file_size, 8192);
        let largest = (u64::MAX >> 30) << 30;
        for (text, bytes) in [("0K", 0), ("3M", 3 << 20), ("17179869183G", largest)] {
            let flags = ["--max-memory", text, "--body-cache", text, "--binlog-limit", text];
            let Settings { max_memory_bytes, body_cache_bytes, max_binlog_bytes, .. } =
                options(&[&flags[..], &["-b", "jobs"]].concat()).settings;
            let sizes = [max_memory_bytes, body_cache_bytes.unwrap(), max_binlog_bytes];
            assert_eq!(sizes, [bytes; 3], "{text}");
        }
    }

    #[test]
    fn wrong_sizes_are_named() {
        let wrong = ["", "K", "10X", "1k", "1KB", "1KK", "1 K", "+1K", "-1K", "1.5G", "0x10", "1 "];
        for flag in ["-s", "-z", "--max-memory", "--body-cache", "--binlog-limit"] {
            for text in wrong.into_iter().chain(["17179869184G", "+", " ", "+-1", "- 1"]) {
                let error = error_of(&[flag, text, "-b", "jobs"]);
                let expected = "not a size, such as 65535, 64K or 1M";
                assert_eq!(error, format!("{flag} {text}: {expected}"));
            }
        }
        // The signs of C are for its flags only.
        for text in ["+1", "-1", "18446744073709551616"] {
            assert!(error_of(&["--max-memory", text]).contains("not a size"), "{text}");
        }
    }

    #[test]
    fn metrics_have_an_address_and_a_port() {
        let metrics = |text| options(&["--metrics", text]).metrics.unwrap();
        assert_eq!(metrics("127.0.0.1:9100"), tcp(Some("127.0.0.1"), 9100));
        assert_eq!(metrics("localhost:0"), tcp(Some("localhost"), 0));
        assert_eq!(metrics("[::1]:9100"), tcp(Some("::1"), 9100));
        assert_eq!(metrics(":9100"), tcp(None, 9100));
        assert_eq!(metrics("unix:/x:9"), Address::Unix { path: "/x:9".into(), mode: None });
        for text in
            ["", "9100", "127.0.0.1", "127.0.0.1:", "127.0.0.1:+1", "x:65536", "::1:9100", "unix:"]
        {
            let error = error_of(&["--metrics", text]);
            assert!(error.starts_with(&format!("--metrics {text}: ")), "{error}");
        }
    }

    #[test]
    fn limits_and_formats() {
        assert_eq!(
            options(&["--max-memory", "18446744073709551615"]).settings.max_memory_bytes,
            u64::MAX
        );
        assert_eq!(options(&["--max-memory=0"]).settings.max_memory_bytes, 0);
        assert_eq!(options(&["--max-connections=1"]).max_connections, Some(1));
        assert_eq!(options(&["--bury-after", "65535"]).settings.bury_after, NonZero::new(65_535));
        assert_eq!(options(&[]).settings.bury_after, None);
        let metrics = ["--metrics", "[::]:1", "--metrics-tubes", "0"];
        assert_eq!(options(&metrics).settings.metrics_tubes, Some(0));
        assert_eq!(options(&["--log-format", "json"]).log_format, LogFormat::Json);
        assert_eq!(
            options(&["--log-format=json", "--log-format", "text"]).log_format,
            LogFormat::Text
        );
        assert_eq!(error_of(&["--log-format", "xml"]), "--log-format xml: not text or json");
        let zero = error_of(&["--max-connections", "0"]);
        assert_eq!(zero, "--max-connections 0: not a number from 1 on");
        let zero = error_of(&["--bury-after", "0"]);
        assert_eq!(zero, "--bury-after 0: not a number from 1 to 65535");
        let too_large = error_of(&["--bury-after", "65536"]);
        assert_eq!(too_large, "--bury-after 65536: not a number from 1 to 65535");
    }

    #[test]
    fn a_body_cache_needs_the_files_of_a_directory() {
        assert_eq!(options(&["-b", "jobs"]).settings.body_cache_bytes, None);
        for (flag, bytes) in [
            ("--body-cache=0", 0),
            ("--body-cache=1048576", 1_048_576),
            ("--body-cache=18446744073709551615", u64::MAX),
        ] {
            assert_eq!(options(&[flag, "-b", "jobs"]).settings.body_cache_bytes, Some(bytes));
            let error = error_of(&[flag]);
            assert_eq!(
                error,
                "--body-cache needs -b DIR: without a binlog, a body is only in memory"
            );
        }
        let twice = options(&["--body-cache=1", "-b", "jobs", "--body-cache", "2"]);
        assert_eq!(twice.settings.body_cache_bytes, Some(2));
    }

    #[cfg(feature = "etcd")]
    #[test]
    fn a_body_cache_cannot_read_from_etcd() {
        let error = error_of(&["-b", "etcd://localhost:2379/jobs", "--body-cache", "0"]);
        assert_eq!(error, "--body-cache needs -b DIR: bodies cannot be read back from etcd");
    }

    #[cfg(feature = "etcd")]
    #[test]
    fn the_quota_of_etcd_is_its_default_if_it_is_0() {
        for (quota, expected) in [("0", 2 << 30), ("8G", 8 << 30)] {
            let etcd = options(&["-b", "etcd://a/b", "--etcd-quota", quota]).binlog;
            let Some(BinlogPlace::Etcd(etcd)) = etcd else { panic!("{etcd:?} is not in etcd") };
            assert_eq!(etcd.quota, expected);
        }
    }

    #[test]
    fn flags_for_etcd_are_in_the_help_of_its_feature() {
        let (with, without) = (usage(true), usage(false));
        for text in ["--lease-ttl", "--etcd-ca", "--import", "etcd://HOST"] {
            assert!(with.contains(text) && !without.contains(text), "{text}");
        }
    }

    #[test]
    fn help_and_version_come_before_anything_else() {
        assert_eq!(parsed(&["-h", "what"]), Ok(Mode::Help));
        assert_eq!(parsed(&["--version"]), Ok(Mode::Version));
        assert_eq!(version(), "beanstalkd 1.13 (beanstalkd-server 0.1.0)");
        assert!(usage(true).starts_with("Use: beanstalkd"));
    }
}
