//! The part of a server in its cluster, and why it has none.

#![cfg_attr(not(feature = "etcd"), expect(dead_code, reason = "there is no cluster without etcd"))]

use std::fmt;

/// The part of a server in its cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It is not known yet whether another server leads.
    Undecided,
    /// The server with this name leads.
    Standby(String),
    /// This server leads.
    Leader,
}

/// Why a server is no member, or no member any more.
#[derive(Debug)]
pub enum MembershipError {
    /// etcd refuses what the server needs, or the server cannot ask it.
    Refused(String),
    /// The server does not lead any more.
    Lost(String),
}

/// The exit code of a server that led and does not any more: EX_TEMPFAIL of sysexits(3). It is to be
/// started again, and stands by then.
pub const EXIT_LOST: u8 = 75;

impl fmt::Display for MembershipError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MembershipError::Refused(reason) => f.write_str(reason),
            MembershipError::Lost(reason) => write!(f, "not leading any more: {reason}"),
        }
    }
}
