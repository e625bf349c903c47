//! The flags of a binlog in etcd: the URL, the lease, and the files for TLS.

use super::wrong;
use crate::flags::{Flags, number, with_port};
use crate::os::membership::{EtcdOptions, TlsFiles};
use std::path::PathBuf;

const DEFAULT_PORT: u16 = 2379;
const DEFAULT_LEASE_TTL_SECS: u32 = 5;
/// The default of etcd too.
const DEFAULT_QUOTA: u64 = 2 * 1024 * 1024 * 1024;

/// The limit of a binlog in etcd without `--binlog-limit`: a quarter of the default quota of etcd.
pub const DEFAULT_BINLOG_LIMIT: u64 = 512 * 1024 * 1024;

/// Each flag that needs the feature `etcd`.
pub const FLAGS: &str = "\
--lease-ttl SECONDS: another server leads this many seconds after this one is gone, from 2 to 60 (default: 5)
--etcd-quota BYTES: quota of etcd: puts are refused near it (default: 2147483648, as of etcd)
--etcd-ca FILE: certificates of the authorities for etcds://, in PEM format
--etcd-cert FILE: certificate of this server for etcds://, in PEM format
--etcd-key FILE: key of that certificate, in PEM format
--import DIR: copy the binlog in DIR to an unused prefix of etcd, and exit
--export DIR: copy the binlog from etcd to DIR, and exit
--leave FILE: end the lease of the killed server that FILE names, and exit";

/// Returns whether the argument of `-b` is a URL, not a directory. Like `./etcd:`, a directory with
/// such a name can be given by another path.
pub fn is_url(text: &str) -> bool {
    text.starts_with("etcd://") || text.starts_with("etcds://")
}

/// Parses the URL and the flags that belong to it.
pub fn etcd_options(url: &str, flags: &Flags) -> Result<EtcdOptions, String> {
    let (nodes, prefix, is_tls) = parse_url(url)?;
    if !cfg!(feature = "etcd") {
        return wrong(format!(
            "-b {url}: this program was built without etcd; build it with `cargo build --release \
             --features etcd`"
        ));
    }
    if let Some(flag) = ["f", "F"].into_iter().find(|flag| flags.has(flag)) {
        return wrong(format!(
            "-{flag} has no meaning for a binlog in etcd, which stores each change before its reply"
        ));
    }
    Ok(EtcdOptions {
        url: url.to_owned(),
        nodes,
        prefix,
        tls: tls_files(flags, is_tls)?,
        file_size: flags.file_size(&mut Vec::new())?,
        lease_ttl_secs: flags
            .value("lease-ttl", "from 2 to 60", |text| {
                number(text).filter(|secs| (2..=60).contains(secs))
            })?
            .unwrap_or(DEFAULT_LEASE_TTL_SECS),
        // Like etcd, which takes 0 for its default.
        quota: flags.size("etcd-quota")?.filter(|&quota| quota > 0).unwrap_or(DEFAULT_QUOTA),
    })
}

/// Returns the nodes, the prefix, and whether TLS is used.
fn parse_url(url: &str) -> Result<(Vec<String>, String, bool), String> {
    let wrong = |what: &str| format!("-b {url}: {what}");
    let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong("not a URL"))?;
    let (hosts, path) = rest.split_once('/').ok_or_else(|| {
        wrong("no prefix for the keys: it is the path of the URL, as in etcd://10.0.0.1:2379/jobs")
    })?;
    let is_plain =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'/');
    let prefix = path.trim_end_matches('/');
    if prefix.is_empty() || prefix.split('/').any(str::is_empty) || !prefix.bytes().all(is_plain) {
        return Err(wrong("the prefix may have letters, digits, '-', '_', '.' and single slashes"));
    }
    let nodes: Vec<String> = hosts
        .split(',')
        .map(|host| {
            with_port(host, DEFAULT_PORT).ok_or_else(|| wrong("a node is HOST or HOST:PORT"))
        })
        .collect::<Result<_, _>>()?;
    Ok((nodes, format!("/{prefix}"), scheme == "etcds"))
}

fn tls_files(flags: &Flags, is_tls: bool) -> Result<Option<TlsFiles>, String> {
    let file = |flag| flags.text(flag).map(PathBuf::from);
    match (is_tls, ["etcd-ca", "etcd-cert", "etcd-key"].map(file)) {
        (false, [None, None, None]) => Ok(None),
        (false, _) => {
            wrong("--etcd-ca, --etcd-cert and --etcd-key need a URL that begins with etcds://")
        }
        (true, [_, Some(_), None] | [_, None, Some(_)]) => {
            wrong("--etcd-cert and --etcd-key need each other")
        }
        (true, [None, ..]) => wrong("an etcds:// URL needs --etcd-ca"),
        (true, [Some(authorities), certificate, key]) => {
            Ok(Some(TlsFiles { authorities, identity: certificate.zip(key) }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_has_nodes_and_a_prefix() {
        let parsed = |url| parse_url(url).unwrap();
        let (nodes, prefix, is_tls) = parsed("etcd://10.0.0.1:2379,b.example,[::1]:7/team/jobs/");
        assert_eq!(nodes, ["10.0.0.1:2379", "b.example:2379", "[::1]:7"]);
        assert_eq!((prefix.as_str(), is_tls), ("/team/jobs", false));
        assert!(parsed("etcds://a/b").2);
        assert_eq!(parsed("etcd://[fe80::1]/b").0, ["[fe80::1]:2379"]);
        for url in [
            "etcd://",
            "etcd:///jobs",
            "etcd://a",
            "etcd://a/",
            "etcd://a//",
            "etcd://a/b//c",
            "etcd://a/b?c",
            "etcd://a/b c",
            "etcd://a,/b",
            "etcd://a:/b",
            "etcd://a:0/b",
            "etcd://a:65536/b",
            "etcd://a:1:2/b",
            "etcd://[::1/b",
            "etcd://[]/b",
            "etcd://[::1]2379/b",
            "etcd://user@a/b",
        ] {
            let error = parse_url(url).unwrap_err();
            assert!(error.starts_with(&format!("-b {url}: ")), "{error}");
        }
    }
}
