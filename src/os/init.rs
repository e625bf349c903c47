//! What falls to the first process, that of a container or of a machine, beside its own work.
//!
//! Orphans are its children, and it has to reap them. If it is that of a machine, nobody
//! else is there: it brings up the network, loads modules of the kernel and mounts a disk, as
//! the kernel's command line says, and when it ends it has to switch the machine off, as the
//! kernel would panic otherwise. In a container all that has been done by others.
//!
//! The kernel passes `NAME=value` of its command line on in the environment, as far as it knows no
//! such name itself. These are known here:
//!
//! ```text
//! modules=DIRECTORY
//! ip=ADDRESS:[SERVER]:[GATEWAY]:[NETMASK]:[HOSTNAME]:[INTERFACE]:[off]
//! mount=DEVICE:DIRECTORY:TYPE
//! ```
//!
//! The second is the kernel's own form; a kernel that knows it does the work.

use super::sys::files;
use super::sys::machine::{self, MachineEnd};
use log::{info, warn};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A machine whose first process this is.
#[derive(Debug)]
pub struct Machine {
    mounted: Option<Mount>,
    /// Each sends a signal for as long as it is open.
    power_buttons: Vec<File>,
}

/// Why the machine cannot be made ready.
#[derive(Debug)]
pub struct MachineError(String);

/// What is said of the network on the command line of the kernel.
#[derive(Debug, PartialEq, Eq)]
struct Network {
    address: Ipv4Addr,
    netmask: Ipv4Addr,
    gateway: Option<Ipv4Addr>,
    hostname: Option<String>,
    /// The first one that there is, if none is named.
    interface: Option<String>,
}

/// A disk, and where it is to be found.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    device: String,
    directory: String,
    kind: String,
}

const LOOPBACK: &str = "lo";

/// The first process may open 4096 files; more than this the kernel allows to nobody.
const OPEN_FILES: u64 = 1 << 20;

/// Devices may need a moment after their module was loaded: up to ten seconds.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
const LOOKS: usize = 1000;

/// Interfaces are numbered from 1 on. The first one after loopback is rarely beyond that.
const INTERFACES: u32 = 64;

/// The orphans that fall to this process, if it is the first, leave nothing behind.
pub fn reap_orphans() {
    if machine::is_first_process() {
        machine::leave_orphans_to_the_kernel();
    }
}

impl Machine {
    /// The machine of which this is the first process, if it is. From now on it ends with this
    /// process: when that panics, too.
    pub fn of_this_process() -> Option<Machine> {
        if !machine::is_first_process() || is_in_a_container() || !machine::take_ctrl_alt_del() {
            return None;
        }
        let tell = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            tell(panic);
            machine::end_machine(MachineEnd::PowerOff)
        }));
        Some(Machine { mounted: None, power_buttons: Vec::new() })
    }

    /// Makes it ready to serve, as its command line says. `user` is whom the process is to become.
    ///
    /// # Errors
    /// The command line cannot be followed.
    pub fn prepare(&mut self, user: Option<&str>) -> Result<(), MachineError> {
        if let Some(user) = user {
            let why =
                "the first process of a machine has to stay root, or nobody could switch it off";
            return Err(MachineError(format!("-u {user}: {why}")));
        }
        // All is read before anything is done.
        let network = told("ip", Network::parse)?.flatten();
        let mount = told("mount", Mount::parse)?;
        if let Err(error) = machine::mount_devices("/dev") {
            warn!("/dev: cannot be mounted, so there are no disks: {error}");
        }
        if let Some(directory) = std::env::var_os("modules") {
            load_modules(Path::new(&directory)).map_err(|error| failed("modules", &error))?;
        }
        self.find_power_buttons();
        if let Err(error) = files::set_file_limit(OPEN_FILES) {
            warn!("cannot raise the limit of open files: {error}");
        }
        if let Err(error) = machine::bring_interface_up(LOOPBACK) {
            warn!("{LOOPBACK}: cannot be brought up: {error}");
        }
        if let Some(network) = network {
            network.bring_up().map_err(|error| failed("ip", &error))?;
        }
        if let Some(mount) = mount {
            mount.mount().map_err(|error| failed("mount", &error))?;
            info!("{} is mounted on {}", mount.device, mount.directory);
            self.mounted = Some(mount);
        }
        Ok(())
    }

    /// Ends the machine.
    pub fn end(self, end: MachineEnd) -> ! {
        let (own_kib, free_kib) = machine::memory_kib();
        info!("the server had up to {own_kib} KiB of memory, {free_kib} KiB are free");
        if let Some(mount) = &self.mounted
            && let Err(error) = machine::unmount(&mount.directory)
        {
            // What was written is safe all the same.
            warn!("{}: cannot be unmounted: {error}", mount.directory);
        }
        machine::end_machine(end)
    }

    /// The one of the machine is a keyboard with one key. Pressing it is to stop the server.
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

/// What the command line says of `name`, if it does.
fn told<T>(
    name: &str,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<Option<T>, MachineError> {
    let Some(text) = std::env::var_os(name) else { return Ok(None) };
    parse(&text.to_string_lossy()).map(Some).map_err(|why| failed(name, &why))
}

/// What the command line says of `name` cannot be followed.
fn failed(name: &str, why: &dyn fmt::Display) -> MachineError {
    let text = std::env::var_os(name).unwrap_or_default();
    MachineError(format!("{name}={}: {why}", text.display()))
}

/// Whether others were here before, and gave this process a world of its own. Where it is not
/// told, as on a machine where nobody has mounted anything, the kernel is to be asked; some
/// containers end a process that asks.
fn is_in_a_container() -> bool {
    const OF_THE_MACHINE: &str = "pid:[4026531836]";
    fs::read_link("/proc/self/ns/pid").is_ok_and(|own| own != Path::new(OF_THE_MACHINE))
}

/// Loads all modules of a directory, in the order of their names; those that lack another one
/// are tried again when that may be there.
fn load_modules(directory: &Path) -> io::Result<()> {
    let mut waiting: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(directory)? {
        waiting.push(entry?.path());
    }
    waiting.sort_unstable();
    loop {
        let count = waiting.len();
        let mut lacking = Vec::new();
        for path in waiting {
            let is_packed = path.extension().is_none_or(|extension| extension != "ko");
            match File::open(&path).and_then(|file| machine::load_module(&file, is_packed)) {
                Ok(()) => info!("{} is loaded", path.display()),
                Err(error) if error.kind() == ErrorKind::NotFound => lacking.push(path),
                // Not every machine has what it is for.
                Err(error) => warn!("{}: cannot be loaded: {error}", path.display()),
            }
        }
        if lacking.len() == count {
            for path in &lacking {
                warn!("{}: cannot be loaded: it needs a module that is not there", path.display());
            }
            return Ok(());
        }
        waiting = lacking;
    }
}

/// Waits for what may need a moment.
fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    for _ in 0..LOOKS {
        if let Some(found) = look() {
            return Some(found);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    None
}

impl Network {
    /// Reads what the kernel calls `ip=`; nothing if there is to be no address.
    fn parse(text: &str) -> Result<Option<Network>, String> {
        const MOST_FIELDS: usize = 10;
        let fields: Vec<&str> = text.split(':').collect();
        let field = |index: usize| fields.get(index).copied().filter(|field| !field.is_empty());
        if fields.len() > MOST_FIELDS {
            return Err("too many fields: only IPv4 addresses are set".to_owned());
        }
        // One word alone can say what the seventh field says.
        let autoconf = match fields[..] {
            [word] if word.parse::<Ipv4Addr>().is_err() => field(0),
            _ => field(6),
        };
        match autoconf {
            None | Some("off" | "none") => {}
            Some("dhcp" | "bootp" | "rarp" | "both" | "any" | "on") => {
                return Err("DHCP and its kin are not to be had: give an address, as in \
                     ip=192.0.2.10::192.0.2.1:255.255.255.0"
                    .to_owned());
            }
            Some(other) if fields.len() == 1 => {
                return Err(format!("{other}: not an IPv4 address"));
            }
            Some(other) => return Err(format!("{other}: not known")),
        }
        if field(2).is_none() && (field(0).is_none() || field(0) == autoconf) {
            return Ok(None);
        }
        let address = |index, what: &str| {
            let parse =
                |text: &str| text.parse().map_err(|_| format!("{text}: not an IPv4 {what}"));
            field(index).map(parse).transpose()
        };
        let own = address(0, "address")?.ok_or("there is no address")?;
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
            machine::set_hostname(hostname)?;
        }
        let is_wanted = |name: &String| match &self.interface {
            Some(wanted) => name == wanted,
            None => name != LOOPBACK,
        };
        let find = || (1..=INTERFACES).filter_map(machine::interface_name).find(is_wanted);
        let interface = wait_for(find).ok_or_else(|| {
            io::Error::other("there is no such network interface: a module may be missing")
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

/// What was a matter of course before there were netmasks, and is the kernel's default.
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
                Ok(Mount {
                    device: device.to_owned(),
                    directory: directory.to_owned(),
                    kind: kind.to_owned(),
                })
            }
            _ => Err("not of the form mount=/dev/vda:/jobs:ext4".to_owned()),
        }
    }

    fn mount(&self) -> io::Result<()> {
        fs::create_dir_all(&self.directory)?;
        wait_for(|| Path::new(&self.device).exists().then_some(()))
            .ok_or_else(|| io::Error::other("there is no such device: a module may be missing"))?;
        machine::mount(&self.device, &self.directory, &self.kind)
    }
}

impl fmt::Display for MachineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(text: &str) -> Network {
        Network::parse(text).expect("it makes sense").expect("it has an address")
    }

    #[test]
    fn an_address_is_told_as_the_kernel_documents_it() {
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
    fn a_netmask_that_is_not_told_comes_from_the_class() {
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
    fn no_address_is_wanted() {
        for text in ["", "off", "none", ":::::eth0:off", "::::::", ":::::eth0:none"] {
            assert_eq!(Network::parse(text), Ok(None), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_followed_is_told() {
        for text in ["dhcp", "on", "any", "::::::dhcp", ":::::eth0:dhcp", "192.0.2.10::::::bootp"] {
            let why = Network::parse(text).expect_err("nobody is asked");
            assert!(why.contains("DHCP"), "{text}: {why}");
        }
        for (text, named) in [
            ("192.0.2", "192.0.2: not an IPv4 address"),
            ("jobs", "jobs: not an IPv4 address"),
            ("192.0.2.10::gw", "gw: not an IPv4 address of a gateway"),
            ("192.0.2.10:::24", "24: not an IPv4 netmask"),
            ("192.0.2.10:::255.0.255.0", "255.0.255.0: not an IPv4 netmask"),
            ("192.0.2.10::::::auto", "auto: not known"),
            ("::192.0.2.1", "there is no address"),
            ("[2001:db8::1]::[2001:db8::ff]:64::eth0:off", "too many fields"),
        ] {
            let why = Network::parse(text).expect_err("it makes no sense");
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
    fn this_process_has_no_machine() {
        assert!(Machine::of_this_process().is_none());
    }
}
