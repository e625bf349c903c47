//! The additional duties of a first process, in a container or on a machine.
//!
//! A first process inherits orphans and has to reap them. The first process of a machine also sets the
//! machine up, by the kernel's command line: it configures the network, loads kernel modules and
//! mounts a disk. At its end it switches the machine off, as the kernel would panic otherwise. In a
//! container the container manager does all of that.
//!
//! The kernel passes each `NAME=value` of its command line that it does not know to the environment.
//! This module knows these:
//!
//! ```text
//! modules=DIRECTORY
//! ip=ADDRESS:[SERVER]:[GATEWAY]:[NETMASK]:[HOSTNAME]:[INTERFACE]:[off]
//! mount=DEVICE:DIRECTORY:TYPE
//! ```
//!
//! The second one has the kernel's own format. A kernel that knows it configures the network itself.

use super::sys::{files, machine};
use log::{info, warn};
use rustix::mount::{self, MountFlags, UnmountFlags};
use rustix::system::RebootCommand;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The machine, if this is its first process.
pub struct Machine {
    mounted: Option<Mount>,
    /// Each sends a signal for as long as it is open.
    power_buttons: Vec<File>,
}

/// The network configuration of the kernel's command line.
#[derive(Debug, PartialEq, Eq)]
struct Network {
    address: Ipv4Addr,
    netmask: Ipv4Addr,
    gateway: Option<Ipv4Addr>,
    hostname: Option<String>,
    /// `None` means the first one.
    interface: Option<String>,
}

/// A disk and its mount point.
struct Mount {
    device: String,
    directory: String,
    kind: String,
}

const LOOPBACK: &str = "lo";

/// Nothing on the file system can be run.
const SAFE_FLAGS: MountFlags = MountFlags::NOSUID.union(MountFlags::NOEXEC);

/// The kernel's maximum. The first process begins with a limit of 4096.
const OPEN_FILES: u64 = 1 << 20;

/// After its module was loaded, a device may take up to ten seconds to appear.
const WAIT_PAUSE: Duration = Duration::from_millis(10);
const WAIT_ATTEMPTS: usize = 1000;

/// Interfaces with numbers from 1 to this are searched. The first one after loopback is rarely beyond.
const INTERFACES: u32 = 64;

impl Machine {
    /// Returns the machine if this is its first process. From now on the machine shuts down with this
    /// process, also after a panic.
    pub fn of_this_process() -> Option<Machine> {
        if !machine::is_first_process() || is_in_a_container() {
            return None;
        }
        // On Ctrl-Alt-Del the kernel sends SIGINT to this process then, instead of restarting the machine.
        // It refuses that in a container.
        rustix::system::reboot(RebootCommand::CadOff).ok()?;
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            report(panic);
            machine::shut_down(RebootCommand::PowerOff)
        }));
        Some(Machine { mounted: None, power_buttons: Vec::new() })
    }

    /// Sets the machine up by the kernel's command line. `user` is the argument of `-u`.
    ///
    /// # Errors
    /// A message that names the variable and the reason.
    pub fn prepare(&mut self, user: Option<&str>) -> Result<(), String> {
        if let Some(user) = user {
            let why =
                "the first process of a machine stays root, to switch the machine off at its end";
            return Err(format!("-u {user}: {why}"));
        }
        // All variables are parsed before the first step.
        let network = parse_variable("ip", Network::parse)?.flatten();
        let disk = parse_variable("mount", Mount::parse)?;
        if let Err(error) = mount::mount("devtmpfs", "/dev", "devtmpfs", SAFE_FLAGS, None) {
            warn!("cannot mount /dev: {error}; starting without disks");
        }
        if let Some(directory) = std::env::var_os("modules") {
            load_modules(Path::new(&directory)).map_err(|error| failed("modules", &error))?;
        }
        self.find_power_buttons();
        if let Err(error) = files::set_file_limit(OPEN_FILES) {
            warn!("cannot raise the limit of open files: {error}; keeping the present limit");
        }
        if let Err(error) = machine::bring_interface_up(LOOPBACK) {
            warn!("cannot bring up {LOOPBACK}: {error}; starting without it");
        }
        if let Some(network) = network {
            network.bring_up().map_err(|error| failed("ip", &error))?;
        }
        if let Some(disk) = disk {
            disk.mount().map_err(|error| failed("mount", &error))?;
            info!("{} is mounted on {}", disk.device, disk.directory);
            self.mounted = Some(disk);
        }
        Ok(())
    }

    /// Shuts the machine down.
    pub fn end(self, end: RebootCommand) -> ! {
        if let Some(disk) = &self.mounted
            && let Err(error) = mount::unmount(&disk.directory, UnmountFlags::empty())
        {
            // Shutting down syncs the disk.
            warn!("cannot unmount {}: {error}; shutting down", disk.directory);
        }
        machine::shut_down(end)
    }

    /// Makes power buttons stop the server. The kernel presents each as a keyboard with one key.
    fn find_power_buttons(&mut self) {
        let Ok(entries) = fs::read_dir("/dev/input") else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let Ok(device) = File::open(&path) else { continue };
            let is_one =
                machine::input_device_name(&device).is_ok_and(|name| name == "Power Button");
            if is_one && machine::terminate_on_input(&device).is_ok() {
                info!("the power button is {}", path.display());
                self.power_buttons.push(device);
            }
        }
    }
}

/// Parses a variable of the command line, if it is set.
fn parse_variable<T>(
    name: &str,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<Option<T>, String> {
    let Some(text) = std::env::var_os(name) else { return Ok(None) };
    parse(&text.to_string_lossy()).map(Some).map_err(|why| failed(name, &why))
}

/// Returns the error of a variable of the command line.
fn failed(name: &str, why: &dyn fmt::Display) -> String {
    let text = std::env::var_os(name).unwrap_or_default();
    format!("{name}={}: {why}", text.display())
}

/// Returns whether this process has a PID namespace of its own. On a machine without /proc that is
/// unknown, and `false`; the next system call that only the first process of a machine may make
/// decides then. That call is not tried in a container, because some containers kill the process.
fn is_in_a_container() -> bool {
    const INITIAL_NAMESPACE: &str = "pid:[4026531836]";
    fs::read_link("/proc/self/ns/pid").is_ok_and(|own| own != Path::new(INITIAL_NAMESPACE))
}

/// Loads all modules of a directory, in the order of their names. Modules that need another one are
/// tried again after the others.
fn load_modules(directory: &Path) -> io::Result<()> {
    let paths = fs::read_dir(directory)?.map(|entry| Ok(entry?.path()));
    let mut waiting: Vec<PathBuf> = paths.collect::<io::Result<_>>()?;
    waiting.sort_unstable();
    loop {
        let count = waiting.len();
        let mut incomplete = Vec::new();
        for path in waiting {
            let is_packed = path.extension().is_none_or(|extension| extension != "ko");
            match File::open(&path).and_then(|file| machine::load_module(&file, is_packed)) {
                Ok(()) => info!("loaded {}", path.display()),
                Err(error) if error.kind() == ErrorKind::NotFound => incomplete.push(path),
                // The machine may lack the device of the module.
                Err(error) => warn!("cannot load {}: {error}; skipping it", path.display()),
            }
        }
        if incomplete.len() == count {
            for path in &incomplete {
                warn!("cannot load {}: it needs another module; skipping it", path.display());
            }
            return Ok(());
        }
        waiting = incomplete;
    }
}

/// Calls `look` until it returns a value, for at most ten seconds.
fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    for _ in 0..WAIT_ATTEMPTS {
        if let Some(found) = look() {
            return Some(found);
        }
        std::thread::sleep(WAIT_PAUSE);
    }
    None
}

impl Network {
    /// Parses the kernel's `ip=`. Returns `None` if it sets no address.
    fn parse(text: &str) -> Result<Option<Network>, String> {
        const MAX_FIELDS: usize = 10;
        let fields: Vec<&str> = text.split(':').collect();
        let field = |index: usize| fields.get(index).copied().filter(|field| !field.is_empty());
        if fields.len() > MAX_FIELDS {
            return Err("too many fields: only IPv4 addresses are set".to_owned());
        }
        // A single word may be the value of the seventh field.
        let autoconf = match fields[..] {
            [word] if word.parse::<Ipv4Addr>().is_err() => field(0),
            _ => field(6),
        };
        if let Some(other) = autoconf.filter(|word| !["off", "none"].contains(word)) {
            return Err(format!(
                "{other}: not an IPv4 address, and no DHCP or BOOTP is supported; give an address, as in \
                 ip=192.0.2.10::192.0.2.1:255.255.255.0"
            ));
        }
        if field(2).is_none() && (field(0).is_none() || field(0) == autoconf) {
            return Ok(None);
        }
        let address = |index, what: &str| {
            let parse =
                |text: &str| text.parse().map_err(|_| format!("{text}: not an IPv4 {what}"));
            field(index).map(parse).transpose()
        };
        let own = address(0, "address")?.ok_or("no address")?;
        let netmask = address(3, "netmask")?.unwrap_or_else(|| netmask_of_class(own));
        if u32::from(netmask).leading_ones() + u32::from(netmask).trailing_zeros() != u32::BITS {
            return Err(format!("{netmask}: not an IPv4 netmask"));
        }
        Ok(Some(Network {
            address: own,
            netmask,
            gateway: address(2, "address of a gateway")?,
            hostname: field(4).map(str::to_owned),
            interface: field(5).map(str::to_owned),
        }))
    }

    fn bring_up(&self) -> io::Result<()> {
        if let Some(hostname) = &self.hostname {
            rustix::system::sethostname(hostname.as_bytes())?;
        }
        let is_wanted = |name: &String| match &self.interface {
            Some(wanted) => name == wanted,
            None => name != LOOPBACK,
        };
        let find = || (1..=INTERFACES).filter_map(machine::interface_name).find(is_wanted);
        let interface = wait_for(find).ok_or_else(|| {
            io::Error::other("no such network interface; a module may be missing")
        })?;
        machine::set_interface_address(&interface, self.address, self.netmask)?;
        machine::bring_interface_up(&interface)?;
        if let Some(gateway) = self.gateway {
            machine::add_default_route(gateway)?;
        }
        info!("{interface} has the address {}, netmask {}", self.address, self.netmask);
        Ok(())
    }
}

/// Returns the netmask of the address class, which is the kernel's default.
fn netmask_of_class(address: Ipv4Addr) -> Ipv4Addr {
    match address.octets()[0] {
        0..128 => Ipv4Addr::new(255, 0, 0, 0),
        128..192 => Ipv4Addr::new(255, 255, 0, 0),
        192.. => Ipv4Addr::new(255, 255, 255, 0),
    }
}

impl Mount {
    fn parse(text: &str) -> Result<Mount, String> {
        let fields: Vec<&str> = text.split(':').collect();
        match fields[..] {
            [device, directory, kind]
                if device.starts_with('/') && directory.starts_with('/') && !kind.is_empty() =>
            {
                let [device, directory, kind] = [device, directory, kind].map(str::to_owned);
                Ok(Mount { device, directory, kind })
            }
            _ => Err("not of the form mount=/dev/vda:/jobs:ext4".to_owned()),
        }
    }

    fn mount(&self) -> io::Result<()> {
        fs::create_dir_all(&self.directory)?;
        wait_for(|| Path::new(&self.device).exists().then_some(()))
            .ok_or_else(|| io::Error::other("no such device; a module may be missing"))?;
        let flags = SAFE_FLAGS | MountFlags::NODEV | MountFlags::NOATIME;
        Ok(mount::mount(&*self.device, &*self.directory, &*self.kind, flags, None)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(text: &str) -> Network {
        Network::parse(text).expect("it is valid").expect("it has an address")
    }

    #[test]
    fn an_address_has_the_format_of_the_kernel() {
        let all = network("192.0.2.10:192.0.2.9:192.0.2.1:255.255.255.128:jobs:eth1:off:192.0.2.2");
        let address = |last| Ipv4Addr::new(192, 0, 2, last);
        assert_eq!(
            all,
            Network {
                address: address(10),
                netmask: Ipv4Addr::new(255, 255, 255, 128),
                gateway: Some(address(1)),
                hostname: Some("jobs".to_owned()),
                interface: Some("eth1".to_owned()),
            }
        );
        let least = network("192.0.2.10");
        let nothing = (least.gateway, &least.hostname, &least.interface);
        assert_eq!((least.address, nothing), (address(10), (None, &None, &None)));
        assert_eq!(least, network("192.0.2.10::::::none"));
    }

    #[test]
    fn the_default_netmask_comes_from_the_address_class() {
        for (address, netmask) in [
            ("10.0.0.1", "255.0.0.0"),
            ("127.0.0.1", "255.0.0.0"),
            ("172.16.0.1", "255.255.0.0"),
            ("192.168.0.1", "255.255.255.0"),
        ] {
            assert_eq!(network(address).netmask.to_string(), netmask);
        }
    }

    #[test]
    fn off_and_none_set_no_address() {
        for text in ["", "off", "none", ":::::eth0:off", "::::::", ":::::eth0:none"] {
            assert_eq!(Network::parse(text), Ok(None), "{text}");
        }
    }

    #[test]
    fn invalid_variables_are_rejected() {
        for text in ["dhcp", "on", "any", "::::::dhcp", ":::::eth0:dhcp", "192.0.2.10::::::bootp"] {
            let why = Network::parse(text).expect_err("it is not supported");
            assert!(why.contains("DHCP"), "{text}: {why}");
        }
        for (text, named) in [
            ("192.0.2", "192.0.2: not an IPv4 address"),
            ("jobs", "jobs: not an IPv4 address"),
            ("192.0.2.10::gw", "gw: not an IPv4 address of a gateway"),
            ("192.0.2.10:::24", "24: not an IPv4 netmask"),
            ("192.0.2.10:::255.0.255.0", "255.0.255.0: not an IPv4 netmask"),
            ("192.0.2.10::::::auto", "auto: not an IPv4 address"),
            ("::192.0.2.1", "no address"),
            ("192.0.2.10::::::off::::", "too many fields"),
            ("[2001:db8::1]::[2001:db8::ff]:64::eth0:off", "too many fields"),
        ] {
            let why = Network::parse(text).expect_err("it is invalid");
            assert!(why.contains(named), "{text}: {why}");
        }
    }

    #[test]
    fn a_disk_has_a_device_a_directory_and_a_type() {
        let mount = Mount::parse("/dev/vda1:/var/lib/beanstalkd:ext4").unwrap();
        let parts = (mount.device.as_str(), mount.directory.as_str(), mount.kind.as_str());
        assert_eq!(parts, ("/dev/vda1", "/var/lib/beanstalkd", "ext4"));
        for text in [
            "",
            "/dev/vda",
            "/dev/vda:/jobs",
            "vda:/jobs:ext4",
            "/dev/vda:jobs:ext4",
            "/dev/vda:/jobs:",
            "/dev/vda:/jobs:ext4:ro",
        ] {
            assert!(Mount::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_test_is_no_first_process() {
        assert!(Machine::of_this_process().is_none());
    }
}
